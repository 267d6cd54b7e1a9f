"""A script in the manner of Hugging Face's Trainer, with FSDP2: ``checkpoint-N`` folders, a limit on them, resume,
and at the end a folder that ``from_pretrained`` reads.

    torchrun --nproc-per-node 2 huggingface_fsdp2.py out 4

Start it again with more steps: it goes on from the last checkpoint, on any number of ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup
from transformers.trainer_utils import get_last_checkpoint

import hyperstate as hs

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def build():
    """A tiny model with random weights, each layer sharded, as ``--fsdp "full_shard auto_wrap"`` does."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, get_linear_schedule_with_warmup(optimizer, 1, 20)


def main(output_dir, max_steps, save_steps=2, save_total_limit=2):
    """Train up to `max_steps`, from the last checkpoint in `output_dir` if there is one."""
    model, optimizer, schedule = build()
    trainer_state = {"global_step": 0}
    Path(output_dir).mkdir(exist_ok=True)
    if last := get_last_checkpoint(output_dir):
        trainer_state, scheduler_state = hs.load(last, model, optimizer).extra
        schedule.load_state_dict(scheduler_state)
    for step in range(trainer_state["global_step"], max_steps):
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step + 1, f"{loss.item():.5f}")
        if (step + 1) % save_steps == 0:
            path = f"{output_dir}/checkpoint-{step + 1}"
            scheduler_state = {**schedule.state_dict(), "lr_lambdas": [None]}  # a function, which no file can hold
            hs.save(path, model, optimizer, extra=({"global_step": step + 1}, scheduler_state), keep=save_total_limit)
    to_root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = hs.get_model_state_dict(model, options=to_root)
    if dist.get_rank() == 0:
        LlamaForCausalLM(CONFIG).save_pretrained(f"{output_dir}/final", state_dict=weights)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
