"""moefuse: a torch.compile backend that fuses mixture-of-experts code, wherever the model comes from."""

from __future__ import annotations

from moefuse._version import __version__ as __version__
from moefuse.api import compile as compile
from moefuse.api import explain as explain
from moefuse.config import Options as Options
from moefuse.errors import FusionError as FusionError
from moefuse.errors import OptionError as OptionError
from moefuse.history import last_report as last_report
from moefuse.report import FusionReport as FusionReport
