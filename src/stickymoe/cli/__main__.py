import sys

from stickymoe.cli import main

sys.exit(main())
