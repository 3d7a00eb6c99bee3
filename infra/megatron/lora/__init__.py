"""LoRA layers, their files in PEFT layout, and merging them into the base model."""
