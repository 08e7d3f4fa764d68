"""The question `service`: what HTTP adds to a decision."""
