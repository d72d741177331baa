"""`python -m dsv4c`: the command line without an installed script."""

import sys

from dsv4c.cli.entry import main

sys.exit(main())
