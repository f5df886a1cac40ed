"""What the fixture writers share: hash-made inputs, and values in the form they are stored in."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quant_oracle import hash32

Tensor = torch.Tensor
Tensors = dict[str, tuple[str, np.ndarray]]
D = torch.float64


def uniform(key: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Hash-made inputs, exactly representable in fp32."""
    count = int(np.prod(shape))
    x = low + (high - low) * hash32(np.arange(count) + 65536 * (key + 1)).astype(np.float64) / 2.0 ** 32
    return torch.from_numpy(x.astype(np.float32).astype(np.float64)).reshape(shape)


def f32(x: Tensor) -> tuple[str, np.ndarray]:
    return "F32", x.detach().to(torch.float64).numpy().astype(np.float32)


def i32(x: Tensor) -> tuple[str, np.ndarray]:
    return "I32", x.detach().numpy().astype(np.int32)


def plain(x: Any, digits: int = 9) -> Any:
    """Nested lists with a bounded number of significant digits."""
    if isinstance(x, Tensor):
        return plain(x.tolist(), digits)
    if isinstance(x, (list, tuple)):
        return [plain(v, digits) for v in x]
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x
