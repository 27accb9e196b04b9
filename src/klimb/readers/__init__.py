"""Logs of klimb, verl, TRL and OpenRLHF, in the forms in which people have them, as the doctor's table."""
