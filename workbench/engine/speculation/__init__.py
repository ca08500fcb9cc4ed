"""Speculative decoding: proposers make draft tokens, the verification accepts or rejects them.

A decode with k drafts is a sequence of k + 1 rows in the one packed batch: the last known token and the drafts. Row j
gives the model's logits for the token after draft j, so one forward pass tells how many drafts the model agrees with.
"""
