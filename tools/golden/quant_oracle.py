#!/usr/bin/env python3
"""Independent numpy reference of the weight formats: MXFP4, NVFP4, block FP8 (quantise, pack, dequantise).

Rules, all rounding to nearest with ties to even and saturating at the largest finite value:
  E2M1   code = sign(bit 3) | magnitude(bits 0..2); magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  E4M3   the "fn" variant: bias 7, no infinities, 0x7F / 0xFF are NaN, largest finite 448.
  E8M0   2^(byte - 127); byte 255 is NaN.
  MXFP4  groups of 32 along the last axis. Scale exponent floor(log2(amax)) - 2 (OCP), clamped to [-127, 127]; an all-zero
         group gets scale byte 0. Low nibble = even column.
  NVFP4  groups of 16. weight_scale_2 = amax(tensor) / (6 * 448) in fp32 (1 if the tensor is all zero);
         weight_scale = e4m3(amax(group) / 6 / weight_scale_2); codes = e2m1(x / (weight_scale * weight_scale_2)),
         and 0 where the group scale rounded to 0.
  FP8    blocks of 128 x 128 (ragged edges allowed). scale = amax / 448 in fp32, 1 for an all-zero block;
         code = e4m3(x / scale).
Dequantised values are exact products in fp64 of the stored numbers.

    python quant_oracle.py --out DIR      # writes quant.safetensors and quant.json, and runs the self checks
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MX_GROUP, NV_GROUP, FP8_BLOCK = 32, 16, 128


# ------------------------------------------------------------------------------------------------------------ code points

def e2m1_table() -> np.ndarray:
    return np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])


def e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code >= 128, -value, value)


def e8m0_table() -> np.ndarray:
    value = 2.0 ** (np.arange(256) - 127.0)
    value[255] = np.nan
    return value


def _round_to_grid(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an increasing non-negative grid to |x|; ties to the even index; saturating.

    In both formats the magnitude code increases with the value, so an even code is an even mantissa."""
    mag = np.abs(x)
    upper = np.clip(np.searchsorted(grid, mag, side="left"), 1, len(grid) - 1)
    lower = upper - 1
    middle = 0.5 * (grid[lower] + grid[upper])          # exact in fp64: both ends have few bits
    take_upper = (mag > middle) | ((mag == middle) & (upper % 2 == 0))
    return np.where(take_upper, upper, lower)


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=np.float64)
    return (_round_to_grid(x, E2M1_MAGNITUDES) | (np.signbit(x) * 8)).astype(np.uint8)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, dtype=np.float64)
    code = _round_to_grid(x, e4m3_table()[:127]) | (np.signbit(x) * 128)
    return np.where(np.isnan(x), 127, code).astype(np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)


# ------------------------------------------------------------------------------------------------------------------ MXFP4

def mxfp4_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, cols], cols a multiple of 32 -> packed [rows, cols/2] u8, scale [rows, cols/32] u8 (E8M0)."""
    groups = np.asarray(x, dtype=np.float64).reshape(x.shape[0], -1, MX_GROUP)
    amax = np.abs(groups).max(-1)
    _, exponent = np.frexp(amax)                        # amax = m * 2^exponent, m in [0.5, 1): floor(log2) = exponent - 1
    shared = np.clip(exponent - 1 - 2, -127, 127)
    scale = np.where(amax == 0, 0, shared + 127).astype(np.uint8)
    codes = encode_e2m1(groups / e8m0_table()[scale][..., None])
    return pack_nibbles(codes.reshape(x.shape)), scale


def mxfp4_dequantize(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A scale byte of 255 (NaN) decodes as 254."""
    factor = e8m0_table()[np.minimum(scale, 254)]
    return e2m1_table()[unpack_nibbles(packed)] * np.repeat(factor, MX_GROUP, axis=1)


# ------------------------------------------------------------------------------------------------------------------ NVFP4

def nvfp4_quantize(x: np.ndarray, tensor_amax: float | None = None) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """x [rows, cols], cols a multiple of 16 -> packed u8, weight_scale codes (E4M3) u8, weight_scale_2.

    tensor_amax replaces the amax of x where several tensors share one weight_scale_2."""
    groups = np.asarray(x, dtype=np.float64).reshape(x.shape[0], -1, NV_GROUP)
    amax = np.abs(groups).max(-1)
    top = float(amax.max()) if tensor_amax is None else tensor_amax
    scale_2 = np.float32(top / (6.0 * 448.0)) if top > 0 else np.float32(1.0)
    scale = encode_e4m3(amax / 6.0 / np.float64(scale_2))
    factor = (e4m3_table()[scale] * np.float64(scale_2))[..., None]
    codes = np.where(factor > 0, encode_e2m1(groups / np.where(factor > 0, factor, 1.0)), 0).astype(np.uint8)
    return pack_nibbles(codes.reshape(x.shape)), scale, scale_2


def nvfp4_dequantize(packed: np.ndarray, scale: np.ndarray, scale_2: float) -> np.ndarray:
    factor = e4m3_table()[scale] * np.float64(np.float32(scale_2))
    return e2m1_table()[unpack_nibbles(packed)] * np.repeat(factor, NV_GROUP, axis=1)


def mxfp4_to_nvfp4(packed: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """The lossless cast: same nibbles, weight_scale_2 = 2^(kmax-8), weight_scale = 2^(k-kmax+8). Needs kmax - k <= 17."""
    live = scale[scale > 0].astype(np.int64) - 127
    kmax = int(live.max()) if live.size else 0
    k = scale.astype(np.int64) - 127
    if live.size and kmax - live.min() > 17:
        raise ValueError("exponent span above 17: not a lossless cast")
    block = np.where(scale > 0, encode_e4m3(2.0 ** (k - kmax + 8.0)), 0).astype(np.uint8)
    return packed, np.repeat(block, MX_GROUP // NV_GROUP, axis=1), np.float32(2.0 ** (kmax - 8))


# -------------------------------------------------------------------------------------------------------------- block FP8

def _block_grid(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK)


def _spread(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    grid = scale.reshape(_block_grid(shape)).astype(np.float64)
    return np.repeat(np.repeat(grid, FP8_BLOCK, 0), FP8_BLOCK, 1)[:shape[0], :shape[1]]


def fp8_block_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, cols] -> codes u8 (E4M3) of the same shape, scale fp32 [rb, 1, cb, 1]."""
    rb, cb = _block_grid(x.shape)
    scale = np.ones((rb, 1, cb, 1), dtype=np.float32)
    for i in range(rb):
        for j in range(cb):
            block = x[i * FP8_BLOCK:(i + 1) * FP8_BLOCK, j * FP8_BLOCK:(j + 1) * FP8_BLOCK]
            amax = np.abs(block).max()
            scale[i, 0, j, 0] = np.float32(np.float64(amax) / 448.0) if amax > 0 else 1.0
    return encode_e4m3(np.asarray(x, np.float64) / _spread(scale, x.shape)), scale


def fp8_block_dequantize(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return e4m3_table()[codes] * _spread(scale, codes.shape)


# ------------------------------------------------------------------------------------------------------------ safetensors

_NUMPY = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "BF16": np.uint16,
          "F8_E4M3": np.uint8}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """name -> (dtype string, array); BF16 as uint16 bits, F8_E4M3 as uint8 codes. Little endian, header padded to 8."""
    header: dict[str, object] = {}
    blobs, offset = [], 0
    for name, (dtype, array) in tensors.items():
        array = np.asarray(array)
        blob = array.astype(np.dtype(_NUMPY[dtype]).newbyteorder("<"), order="C").tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.writelines(blobs)


# --------------------------------------------------------------------------------------------------------------- fixtures

def fixtures() -> dict[str, tuple[str, np.ndarray]]:
    """name -> (safetensors dtype, array). Dequantised values are rounded to fp32 (exact for MXFP4)."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0000001, 7.0, 1e9, -0.25, -5.0, -0.0, 0.2500001], np.float32)
    out: dict[str, tuple[str, np.ndarray]] = {
        "e2m1.values": ("F32", e2m1_table()), "e4m3.values": ("F32", e4m3_table()), "e8m0.values": ("F32", e8m0_table()),
        "e2m1.encode_in": ("F32", ties), "e2m1.encode_code": ("U8", encode_e2m1(ties)),
    }
    grid = e4m3_table()[:127]
    e4m3_in = np.concatenate([grid, 0.5 * (grid[1:] + grid[:-1]), [448.0, 463.9, 464.0, 480.0, 1e6, 2.0 ** -10, 2.0 ** -11]])
    e4m3_in = np.concatenate([e4m3_in, -e4m3_in]).astype(np.float32)
    out |= {"e4m3.encode_in": ("F32", e4m3_in), "e4m3.encode_code": ("U8", encode_e4m3(e4m3_in))}
    for rows, cols in ((5, 64), (33, 96)):
        out |= _mxfp4_case(f"mxfp4.{rows}x{cols}", test_matrix(rows, cols))
    for rows, cols in ((5, 48), (33, 96)):
        x, key = test_matrix(rows, cols), f"nvfp4.{rows}x{cols}"
        packed, scale, scale_2 = nvfp4_quantize(x)
        out |= {f"{key}.packed": ("U8", packed), f"{key}.scale": ("U8", scale), f"{key}.scale_2": ("F32", np.array([scale_2])),
                f"{key}.dequantized": ("F32", nvfp4_dequantize(packed, scale, scale_2))}
    for rows, cols in ((130, 200), (3, 129)):
        codes, scale = fp8_block_quantize(test_matrix(rows, cols))
        key, tail = f"fp8.{rows}x{cols}", fp8_block_dequantize(codes, scale)[-3:]
        out |= {f"{key}.codes": ("U8", codes), f"{key}.scale": ("F32", scale), f"{key}.dequantized_last3": ("F32", tail)}
    out["test_matrix.5x64"] = ("F32", test_matrix(5, 64))
    return out


def _mxfp4_case(key: str, x: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    packed, scale = mxfp4_quantize(x)
    _, nv_scale, nv_scale_2 = mxfp4_to_nvfp4(packed, scale)
    return {f"{key}.packed": ("U8", packed), f"{key}.scale": ("U8", scale),
            f"{key}.dequantized": ("F32", mxfp4_dequantize(packed, scale)),
            f"{key}.as_nvfp4_scale": ("U8", nv_scale), f"{key}.as_nvfp4_scale_2": ("F32", np.array([nv_scale_2]))}


def test_matrix(rows: int, cols: int) -> np.ndarray:
    """The source matrices (not stored; test_matrix.5x64 is, as a check of the formula). With h = hash32(r * cols + c):
    x[r,c] = (h - 2^31) * 2^-28 * 2^(r mod 7 - 3), rounded to fp32; then x = 0 for r >= 128, c >= 128 (one whole FP8 block)
    and for r = rows / 2 (integer division), c < 32 (whole MXFP4 and NVFP4 groups)."""
    h = hash32(np.arange(rows * cols)).astype(np.float64).reshape(rows, cols)
    x = ((h - 2.0 ** 31) * 2.0 ** -28 * 2.0 ** (np.arange(rows) % 7 - 3.0)[:, None]).astype(np.float32)
    x[128:, 128:] = 0.0
    x[rows // 2, :32] = 0.0
    return x


def hash32(x: np.ndarray) -> np.ndarray:
    """The 32-bit mix `lowbias32`: x^=x>>16; x*=0x7feb352d; x^=x>>15; x*=0x846ca68b; x^=x>>16 (mod 2^32)."""
    x = np.asarray(x, dtype=np.uint64) & 0xFFFFFFFF
    x ^= x >> np.uint64(16)
    x = (x * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


def notes() -> dict[str, str]:
    rules = __doc__.split("\n\n")[1]
    return {"rules": rules, "test_matrix": test_matrix.__doc__, "hash": hash32.__doc__}


def self_check() -> None:
    for table, encode, count in ((e2m1_table(), encode_e2m1, 16), (e4m3_table(), encode_e4m3, 256)):
        finite = ~np.isnan(table)
        assert (encode(table)[finite] == np.arange(count)[finite]).all(), "encode(decode(code)) = code"
    packed = np.zeros((1, 16), np.uint8)
    packed[0, 0] = 0xB2                                             # hand-checkable numbers of the specification
    assert mxfp4_dequantize(packed, np.array([[124]], np.uint8))[0, :2].tolist() == [0.125, -0.1875]
    assert nvfp4_dequantize(packed, np.array([[0x38, 0x38]], np.uint8), 0.125)[0, :2].tolist() == [0.125, -0.1875]
    assert encode_e4m3(np.array([1.0]))[0] == 0x38
    x = test_matrix(7, 128)
    p, s = mxfp4_quantize(x)
    again = mxfp4_quantize(mxfp4_dequantize(p, s))
    assert (mxfp4_dequantize(*again) == mxfp4_dequantize(p, s)).all(), "MXFP4 requantisation is idempotent"
    assert (nvfp4_dequantize(*mxfp4_to_nvfp4(p, s)) == mxfp4_dequantize(p, s)).all(), "MXFP4 -> NVFP4 cast is lossless"
    assert (fp8_block_quantize(np.zeros((3, 5), np.float32))[1] == 1).all(), "an all-zero block has scale 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    self_check()
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = fixtures()
    write_safetensors(args.out / "quant.safetensors", tensors)
    (args.out / "quant.json").write_text(json.dumps(notes(), indent=1) + "\n")
    print(f"{len(tensors)} tensors, {(args.out / 'quant.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
