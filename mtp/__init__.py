"""What training and decoding share: contract, alignment, modules, target, cells, acceptance."""

from mtp.contract import Contract
from mtp.errors import UserError
from mtp.modules import MTPStack
from mtp.target import Target

__version__ = "0.1.0"
__all__ = ["Contract", "MTPStack", "Target", "UserError", "__version__"]
