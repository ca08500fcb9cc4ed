"""The paged varlen attention kernel in Metal and the code that launches it."""
