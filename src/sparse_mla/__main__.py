"""`python -m sparse_mla` is `sparse-mla`; `torchrun -m sparse_mla` starts it once for each rank."""

from sparse_mla.cli.main import main

if __name__ == "__main__":
    main()
