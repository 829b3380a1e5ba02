"""`make test-changed` runs the tests that a change concerns, beside the quick tier."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import changed
from changed import chosen

CHOSEN = {
    # A family's kernels and checks, by the family's folder.
    "lowering/cuda/norms/rms_norm.py": "tests/ops/norms/test_rms_norm.py",
    "meta/rope.py": "tests/ops/rope/test_rope.py",
    # A part of the compiler, by its folder or the nearest one.
    "liger_ops/rewrites/losses/loss_head.py": "tests/rewrites/losses/test_rewrite_losses.py",
    "liger_ops/fusion/layers/experts/experts.py": "tests/fusion/layers/test_fuse_norms.py",
    "liger_ops/rewrites/explain.py": "tests/rewrites/test_explain.py",
    # A file of no folder, by imports, in a string too.
    "liger_ops/axes.py": "tests/ops/test_every_op.py",
    "lowering/cuda/compiled.py": "tests/lowering/test_launch.py",
    # Shared code of the tests, by imports of imports.
    "tests/support/models/fused_families.py": "tests/fusion/loss/test_fuse_loss.py",
    "tests/support/ops/op_under_test.py": "tests/ops/test_kernels.py",
    "tests/fusion/test_fuse.py": "tests/fusion/test_fuse.py",
    "docs/fuse.md": "tests/project/test_documents.py",
}


@pytest.mark.parametrize(("file", "test"), CHOSEN.items(), ids=CHOSEN.keys())
def test_the_tests_of_a_file_are_chosen(file: str, test: str) -> None:
    tests = {path.as_posix() for path in chosen([Path(file)])}
    assert (changed.ROOT / test).exists() and test in tests
    assert len(tests) < 150


def test_other_tests_are_not() -> None:
    tests = chosen([Path("lowering/cuda/norms/rms_norm.py")])
    assert tests and not {path.parts[1] for path in tests} & {"fusion", "rewrites", "distributed"}
    assert chosen([Path("README.md")]) == chosen([]) == set()


def test_changes_are_those_since_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept", "edited", "committed"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    (tmp_path / "committed.py").write_text("x = 2\n")
    git("commit", "-am", "second")
    (tmp_path / "edited.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("x = 1\n")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed_files("main") == {
        Path(f"{n}.py") for n in ("committed", "edited", "new")
    }
