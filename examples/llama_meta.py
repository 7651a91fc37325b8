"""A Llama of Hugging Face that no rank ever holds whole: built on meta, trained at stage 3, exported, loaded again.

torchrun --nproc-per-node 2 examples/llama_meta.py        (needs transformers)
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import zerokit

RUN, EXPORT = Path("runs/llama_meta/run"), Path("runs/llama_meta/model")

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank = dist.get_rank()

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    use_cache=False,
)
torch.manual_seed(0)
with torch.device("meta"):  # shapes only: this takes no memory, however large the model is
    model = LlamaForCausalLM(config)

# ZeroOptimizer makes the values layer by layer, and each rank keeps its shard. It asks init_fn to initialise one module
# at a time, in place: its own parameters and buffers are real tensors by then, without values. Hugging Face has that
# function for every architecture. The seed is the module's own, so values do not depend on the number of ranks.
optimizer = zerokit.ZeroOptimizer(
    model,
    torch.optim.AdamW,
    stage=3,
    precision="bf16",
    units=LlamaDecoderLayer,  # what is gathered at a time
    init_fn=model._init_weights,
    lr=3e-3,
)

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # a byte is a token
places = torch.Generator().manual_seed(1 + rank)
for step in range(1, 21):
    starts = torch.randint(len(text) - 33, (8,), generator=places).tolist()
    tokens = torch.stack([text[start : start + 33] for start in starts])
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.backward(loss)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

if rank == 0:
    shutil.rmtree(RUN.parent, ignore_errors=True)
dist.barrier()
zerokit.save(RUN, optimizer, step=20)

# The export needs one process and little memory: on a cluster, run `zerokit consolidate RUN -o EXPORT` afterwards.
if rank == 0:
    zerokit.consolidate(RUN, EXPORT, dtype="bf16")
    config.save_pretrained(EXPORT)
dist.barrier()

# What was exported is an ordinary model: it gives the logits that the trained one gives.
tokens = text[None, :32]
with torch.no_grad():
    trained = model(input_ids=tokens).logits.float()
    loaded: torch.nn.Module = LlamaForCausalLM.from_pretrained(EXPORT, dtype=torch.bfloat16)
    loaded.to(device)
    difference = (loaded(input_ids=tokens).logits.float() - trained).abs().max().item()
if rank == 0:
    held, whole = optimizer.memory().parameters, 2 * sum(p.numel() for p in model.parameters())
    print(f"a rank holds {held} bytes of parameters in bf16; the model has {whole}")
    print(f"loaded again from {EXPORT}: logits differ by at most {difference:.4f}")
dist.destroy_process_group()
