"""An agent that learns to use a calculator. About 20 seconds on one core.

Three things are yours in such a project: the tool (a Python function), the questions with their grading (a task), and
a model that has seen calls of tools. The model here is made on the spot, so that nothing needs to be downloaded: it
adds numbers badly in its head, and one time in six it calls the calculator. GRPO finds out that calling it pays.
"""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agilerl import GRPO, Population, Runtime
from agilerl.envs import DatasetTask
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import Example, render_conversation
from agilerl.envs.tools import ToolEnv, tool_schema
from agilerl.rewards import exact_match
from agilerl.streams import stream

torch.set_num_threads(1)


# 1. A tool. Its signature and its docstring describe it to the model.
def calculator(expression: str) -> str:
    """Add whole numbers.

    Args:
        expression: such as 12+34
    """
    return str(sum(int(number) for number in expression.split("+")))


print(json.dumps(tool_schema(calculator)["function"]["parameters"]["properties"]))

# 2. Questions: all sums of two numbers from 10 to 99, with their answers.
pairs = stream(1, "tutorial/questions").permutation([(a, b) for a in range(10, 100) for b in range(10, 100)])
rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs.tolist()]
exam, test, train = rows[:200], rows[200:600], rows[600:]
task = DatasetTask(train, exam, test, reward_fn=exact_match)


# 3. The environment. A completion with a call gets the result of the tool, one without is the answer. The special
# tokens of the model's family decide what a call is; a tag spelt in ordinary characters is not one. "none": this model
# knows its only tool; others are told by their chat template or, if that has no tools, by the system message.
def calculator_env() -> ToolEnv:
    return ToolEnv(task, [calculator], max_turns=3, announce="none")


# 4. A small version of the tokenizers of Hermes and Qwen models: characters, special tokens, the words of a call.
BEGIN, END = "<tool_call>", "</tool_call>"
BEFORE, AFTER = '{"name": "calculator", "arguments": {"expression": "', '"}}'
TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role != 'assistant' %}<|im_start|>{%- endif %}{{ m.content }}<|im_end|>"
    "{%- endfor %}"
)
characters = [chr(code) for code in range(32, 127)]
core = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(characters)}, merges=[]))
core.decoder = decoders.Fuse()
core.add_tokens([AddedToken(text, special=True) for text in ("<pad>", "<|im_start|>", "<|im_end|>")])
core.add_tokens([AddedToken(text, normalized=False) for text in (BEGIN, END, BEFORE, AFTER)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE
)


# 5. A model: it is first shown how to call the calculator, then that most people guess.
def shown(number: int, share_of_calls: float) -> Example:
    draws = stream(2, "tutorial/shown", number)
    row = train[int(draws.integers(len(train)))]
    question, answer = {"role": "user", "content": row["question"]}, row["answer"]
    if draws.random() < share_of_calls:
        call = {"role": "assistant", "content": f"{BEGIN}{BEFORE}{row['question']}{AFTER}{END}"}
        rest = [call, {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]
    else:
        rest = [{"role": "assistant", "content": str(int(answer) + int(draws.integers(-9, 10)))}]
    return render_conversation(tokenizer, [question, *rest])


def learn(examples: list[Example]) -> None:
    """One step on the assistant's tokens."""
    width = max(len(e.ids) for e in examples)
    ids = torch.tensor([e.ids + [tokenizer.pad_token_id] * (width - len(e.ids)) for e in examples])
    learned = torch.tensor([e.learned + [False] * (width - len(e.ids)) for e in examples])
    optimizer.zero_grad()
    model(ids, labels=ids.masked_fill(~learned, -100)).loss.backward()
    optimizer.step()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.1,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
BATCH = 48
for step in range(200):
    if step == 140:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3
    learn([shown(BATCH * step + place, 1.0 if step < 140 else 1 / 6) for place in range(BATCH)])

# 6. Training, as on any other task: one agent here; populations and evolution work as everywhere.
runtime = Runtime.for_model(model.eval(), tokenizer=tokenizer)
agent = GRPO(runtime=runtime, lr=1e-3, beta=0.0, group_size=8, batch_size=128, max_output_tokens=12)
episodes = EpisodeTask(calculator_env, exam_episodes=100, test_episodes=200)
population = Population([agent], episodes, prompts_per_step=16, eval_max_new_tokens=12)
before = population.evaluate("test")[agent.index]
for step in range(10):
    rollout = population.rollout()
    metrics = population.learn(rollout)[agent.index]
    if step % 3 == 0:
        print(f"step {step:2d}: reward {metrics['reward']:.2f}, turns {metrics['env/turns_mean']:.2f}")
after = population.evaluate("test")[agent.index]
print(
    f"test: {before.mean:.2f} -> {after.mean:.2f} (standard error {after.stderr:.2f}, n {after.n}); expect 0.0 -> 1.0"
)

print("an episode:")
print(max(rollout.trajectories[agent.index], key=lambda t: (sum(t.rewards), len(t.text))).text)
assert after.mean > before.mean
