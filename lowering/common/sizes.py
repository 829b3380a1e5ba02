"""Integer arithmetic for the host code of every device."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_width(n: int, most: int) -> int:
    """`most`, a power of 2, or the least one that is at least n. A dynamic n of a package of
    AOTInductor has tiles for any."""
    return most if type(n) is not int or n >= most else next_power_of_2(n)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
