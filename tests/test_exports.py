"""What `import folb` offers, and what it does not load."""

import subprocess
import sys

import pytest

import folb


def test_every_exported_name_resolves():
    assert folb.__all__ == sorted(set(folb.__all__))
    assert all(getattr(folb, name) is not None for name in folb.__all__)
    assert dir(folb) == folb.__all__
    with pytest.raises(AttributeError, match="'no_such_name'"):
        folb.no_such_name  # noqa: B018


def test_import_loads_neither_jax_nor_matplotlib():
    code = "import sys, folb; print(*{'jax', 'numpy', 'optax', 'matplotlib', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_module_that_has_moved_says_where_to():
    with pytest.raises(
        ModuleNotFoundError, match=r"has moved; import folb\.core\.rules, or use `from folb import rules`"
    ):
        import folb.rules
    with pytest.raises(ModuleNotFoundError, match=r"'folb\.figures': folb's modules are in packages now; .*__all__"):
        import folb.figures
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'folb\.core\.nothing'$"):
        import folb.core.nothing  # noqa: F401
