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
