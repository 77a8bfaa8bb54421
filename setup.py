"""Places the one file that must lie beside the packages; all the rest stands in pyproject.toml."""

import os
import sysconfig

from setuptools import Distribution, setup

BESIDE_PACKAGES = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class WithData(Distribution):
    """An editable installation takes data files along only if asked for them by this name."""

    def has_data(self) -> bool:
        """Whether there are files for :func:`setup`'s ``data_files``."""
        return bool(self.data_files)


setup(data_files=[(BESIDE_PACKAGES, ["primus_ext_startup.pth"])], distclass=WithData)
