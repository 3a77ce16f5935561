"""Pretrains any GPT with Megatron's own training loop and this package's layers.

    python examples/pretrain_gpt.py --device cpu --nproc 4 --tensor-model-parallel-size 2 ... --turbo-precision mxfp4
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py ... --turbo-config recipe.yaml

Takes all of Megatron's arguments, `--turbo-*`, `--device` and `--nproc` (`--help`, docs/quickstart.md). The job itself is
`primus_turbo_plugin.training.pretrain`.
"""

import sys

if __name__ == "__main__":
    # In here, not above: helper processes import this file again, and need none of it.
    from primus_turbo_plugin.training.pretrain import cli

    sys.exit(cli(sys.argv[1:]))
