"""Which processors multiply bfloat16 is read from the kernel's description of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.runtime.cpu import multiplies_bfloat16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512_bf16\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu sse2 avx2\nmodel name\t: one with avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bfloat16_products_are_found_by_their_flag(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is expected


def test_without_a_description_products_are_made_in_float32(tmp_path: Path) -> None:
    assert multiplies_bfloat16(tmp_path / "none") is False
