"""Float64 that stays float64: model code casts to float32 inside norms and softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """While active, float64 tensors ignore casts to float32, so that 1e-10 comparisons mean something.

    transformers computes RMSNorm and eager softmax in float32 whatever the input: two ways to the
    same float64 value then differ by a float32 rounding step now and then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to and torch.float32 in args[1:]:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
