"""The real command line, which knows tables: a process that it starts runs this file as well."""

import table_model  # noqa: F401

from specllama.__main__ import main

if __name__ == "__main__":
    main()
