"""Page keys against vectors that SGLang 0.5.23 computed itself.

They come from its `sglang.srt.mem_cache.utils`, in an environment where it is installed:

    tokens = [(i * i * 7919 + 13) % 151_936 for i in range(20)]
    get_hash_str(tokens, None, 4)                                           # PLAIN
    get_hash_str(tokens[:4], storage_namespace_seed(extra_key, salt), 4)    # NAMESPACES
    get_hash_str([0, 1, 2**31 - 1, 2**31], None, 2)                         # WIDE
"""

from __future__ import annotations

import pytest

from hicache_storage.hybrid import namespace_seed, page_hashes
from hicache_storage.spec import InvalidTransferError

TOKENS = [(i * i * 7919 + 13) % 151_936 for i in range(20)]
PLAIN = [
    "a79d4e9c4172b1f189977094754b882221aadaac10306287c05a0c64155f8fe1",
    "18debd72e3e8e093ef83166840add3d689e2ab5bbc05a98f42b02d3c1cae15b4",
    "cca764f99728c185b7d6f9e808d9c3fecd172ebf821b7c7bff1ebe7151a40ac0",
    "11a83d761f29ff4e12516f6d9bcdea988b02b0da4209046c1c7acaa4eca6552c",
    "c2e622de17060e25a4fbdb3ff667567db5a238783a15fdb35f2d16891f7bf6a3",
]
NAMESPACES = {
    (None, None): (None, PLAIN[0]),
    ("lora-a", None): (
        "407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b",
        "52a1add714812db28c1c8292c8e35b0ae504c0e42d4fad74633ad4a14855103d",
    ),
    (None, "salt"): (
        "43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e",
        "3e665718e6cfc6ee49160f8498d360fa7367707dfb6f726407d668dc61948271",
    ),
    ("", None): (
        "fd649dd130277fa0773e23e84ddfa4ec779d9df77087968a60d7cefb9050ab1d",
        "fd06bea911f0be6b9087aac597e8ead0f8b8380a6da812ba672cfd627f55774d",
    ),
    ("lora-a", "salt"): (
        "df3c1352162eaa748618b2b650a1c2a650963edc6dc8f59db1f798d0c9039a46",
        "a683a022ea435a1467c4334fad2fa4dae665b7192f61803d973f581d4fc7b84e",
    ),
    ("Łódź", ""): (
        "5e43290b376c628559422b19b99a2108c650d10ebd243e8c4915630d0ef8ca14",
        "e3e8bf93f337448aef112c9af9e11ef198d1fa0339bb5492596486d21675141b",
    ),
}
WIDE = [
    "01acecb507abfe1a354aa8064f4af5d3f1acd019e37db3c11c97523b71c76e9d",
    "c995fbbc3ea8c566503a9de99af0fa204fd607d2c41b2aad50a4fc699750a620",
]


def test_keys_are_sglangs():
    # A partial page at the end has none.
    assert page_hashes([*TOKENS, 7], 4) == PLAIN
    assert page_hashes(TOKENS[8:], 4, prior=PLAIN[1]) == PLAIN[2:]
    assert page_hashes([0, 1, 2**31 - 1, 2**31], 2) == WIDE


@pytest.mark.parametrize(("names", "expected"), NAMESPACES.items())
def test_namespaces_are_sglangs(names, expected):
    seed = namespace_seed(*names)
    assert seed == expected[0]
    assert page_hashes(TOKENS[:4], 4, prior=seed) == [expected[1]]


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5]])
def test_tokens_that_are_none_are_refused(tokens):
    with pytest.raises(InvalidTransferError, match="tokens must be ids"):
        page_hashes(tokens, 1)


def test_a_prior_key_is_hex():
    with pytest.raises(InvalidTransferError, match="prior"):
        page_hashes([1], 1, prior="not hex")
