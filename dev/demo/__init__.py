"""`make demo`: from nothing to a drafter that is trained, measured, served and watched, on one machine."""
