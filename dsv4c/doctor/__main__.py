"""`python -m dsv4c.doctor`, for machines that lack what the `dsv4c` command itself needs."""

import sys

from dsv4c.doctor.examination import main

if __name__ == "__main__":
    sys.exit(main())
