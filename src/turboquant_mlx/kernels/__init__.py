"""Array programs with one signature and several back-ends; one dispatcher chooses."""
