"""Code that several backends share."""
