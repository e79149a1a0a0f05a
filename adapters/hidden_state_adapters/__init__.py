"""Adapters that connect hidden_state_accountants to training frameworks."""
