"""Evidence on pretrained models: KL over twelve texts and questions that full precision answers, with intervals."""
