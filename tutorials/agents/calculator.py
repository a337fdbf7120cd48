"""An agent program: it adds numbers, by heart or with a calculator, as an example in the conversation shows."""

import re

EXAMPLE = (
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 12 + 34 ="},
    {"role": "assistant", "content": "calc(12 + 34)"},
    {"role": "user", "content": "46"},
    {"role": "assistant", "content": "46"},
)


def calculator(expression: str) -> str:
    """The tool: sums and differences of whole numbers."""
    return str(sum(int(number) for number in re.findall(r"-?\d+", expression.replace(" ", ""))))


async def agent(client, row):
    messages = [*EXAMPLE, {"role": "user", "content": row["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
        answer = reply.choices[0].message.content or ""
        call = re.fullmatch(r"\s*calc\(([\d +-]+)\)\s*", answer)
        if call is None:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": calculator(call[1])}]
    return answer
