"""The training loop, its jobs (pretrain, finetune) and its measurements."""
