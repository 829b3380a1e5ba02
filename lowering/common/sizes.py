"""Integer arithmetic for the host code of every device."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
