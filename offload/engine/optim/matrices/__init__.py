"""Update rules that step a matrix as a whole: Muon and SinkGD, with AdamW for all other parameters."""
