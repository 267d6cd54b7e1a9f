"""Other libraries' names for the same calls, so that a script switches by changing one import."""
