"""Times of single ops on the device at hand, each run alone with random data.

``python -m primus_ext.observe.microbench --device cpu`` answers requests of one line each; see
:mod:`primus_ext.observe.microbench.serve`.
"""
