"""Numbers of 8 bits, e4m3: sign, four bits of exponent, three of mantissa; four to a word.

In integer arithmetic, so that every GPU can do it. Codes are torch.float8_e4m3fn's: up to 448, no
infinity, steps of 2**-9 near zero.

    a, b, c, d = unpack_e4m3(word)    times E4M3_UNIT; a is the one at the lowest address
    word = pack_e4m3(a, b, c, d)      rounded to nearest even, beyond 448 saturated

A code shifted to where float16 has exponent and mantissa is a float16, subnormals included, but
2**8 times too small. Whoever reads many multiplies by E4M3_UNIT once, at the end.

The code of NaN, 0x7F, is never packed; unpacked, it is 480.
"""

from __future__ import annotations

from minihisparse.kernels.device import (
    bits_of_float,
    device_function,
    float32,
    float_of_bits,
    float_of_half,
    uint32,
)

E4M3_MAX = 448.0
E4M3_UNIT = 256.0

SMALLEST_NORMAL_BITS = (127 - 6) << 23  # of float32 2**-6
FEWER_BITS = 23 - 3  # of mantissa
EXPONENT_SHIFT = (127 - 7) << 3  # between the biases of float32 and e4m3, in codes
LARGEST_CODE = 0x7E
# The last bit of 2**14 is worth 2**-9: what is added is rounded to such steps.
STEPS, STEPS_BITS = 16384.0, (127 + 14) << 23


@device_function
def code_of(x):
    """The code of a float32."""
    bits = bits_of_float(x)
    magnitude = uint32(bits & 0x7FFFFFFF)
    if magnitude < SMALLEST_NORMAL_BITS:
        code = uint32(
            bits_of_float(float32(float_of_bits(magnitude) + float32(STEPS))) - STEPS_BITS
        )
    else:
        odd = (magnitude >> FEWER_BITS) & 1
        rounded = uint32(magnitude + ((1 << (FEWER_BITS - 1)) - 1) + odd)
        code = min(uint32((rounded >> FEWER_BITS) - EXPONENT_SHIFT), uint32(LARGEST_CODE))
    return uint32(code | ((bits >> 24) & 0x80))


@device_function
def pack_e4m3(a, b, c, d):
    return uint32(code_of(a) | (code_of(b) << 8) | (code_of(c) << 16) | (code_of(d) << 24))


@device_function
def halves_of(word):
    """Two float16, of the codes in bytes 0 and 2."""
    return uint32(((word & 0x007F007F) << 7) | ((word & 0x00800080) << 8))


@device_function
def unpack_e4m3(word):
    even, odd = halves_of(word), halves_of(uint32(word >> 8))
    a, b = float_of_half(even), float_of_half(odd)
    return a, b, float_of_half(uint32(even >> 16)), float_of_half(uint32(odd >> 16))
