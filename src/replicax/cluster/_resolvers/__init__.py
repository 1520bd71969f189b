"""How does each scheduler say who is in the job? One file per scheduler, all answering the questions of `base.py`."""
