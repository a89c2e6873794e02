"""Steps that leave no trace: what they change is noted, and put back after each."""
