"""``python -m workbench``: the ``workbench`` command."""

import sys

from workbench.apps.cli import main

sys.exit(main())
