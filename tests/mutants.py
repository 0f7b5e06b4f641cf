"""`python -m tests.mutants [WORD…]`: put each fault of `tests.mutation` in and show that a test goes red."""

from tests.mutation import main

if __name__ == "__main__":
    raise SystemExit(main())
