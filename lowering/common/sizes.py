"""Integer arithmetic for the host code of every device."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_width(n: int, most: int) -> int:
    """Return the least power of 2 that is at least n, but no more than `most`, a power of 2.

    For a dynamic n, in a package of AOTInductor, it is `most`, which serves any n.
    """
    return most if type(n) is not int or n >= most else next_power_of_2(n)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
