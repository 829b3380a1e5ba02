"""Modules that call the ops; each family's file lists its modules in `__all__`."""

from .activations import *
from .attention import *
from .cross_entropy import *
from .embedding import *
from .experts import *
from .heads import *
from .hyper_connections import *
from .layer_norms import *
from .linear import *
from .losses import *
from .norm_variants import *
from .norms import *
from .rope import *
from .softmax import *

__all__ = [name for name, value in globals().items() if isinstance(value, type)]
