"""Ways to a silently wrong epsilon, and what stops each; see docs/threat_model.md."""
