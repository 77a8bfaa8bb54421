"""``python -m primus_ext.observe.microbench --device DEVICE``."""

from primus_ext.observe.microbench.serve import main

main()
