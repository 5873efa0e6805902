# SPDX-License-Identifier: Apache-2.0
"""``python -m profinferd.agent`` is ``profinferd``."""

import sys

from .cli import main

sys.exit(main())
