"""``python -m hidden_state_accountants`` is the command `hsa`."""

from hidden_state_accountants.cli import main

if __name__ == "__main__":
    main()
