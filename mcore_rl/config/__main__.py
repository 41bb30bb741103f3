"""python -m mcore_rl.config > docs/configuration.md"""

from __future__ import annotations

from mcore_rl.config.describe import markdown

print(markdown(), end="")
