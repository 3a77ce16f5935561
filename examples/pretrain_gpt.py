import sys

if __name__ == "__main__":
    from primus_turbo_plugin.training.pretrain import cli

    sys.exit(cli(sys.argv[1:]))
