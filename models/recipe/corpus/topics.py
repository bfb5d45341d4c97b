"""The knowledge of the chat slice: topics with paraphrased sentences, and how-to steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A topic: its names, a definition, its importance, and an example or a hint."""

    names: tuple[str, ...]
    what: tuple[str, ...]
    why: tuple[str, ...]
    more: tuple[str, ...]


T = Topic
TOPICS: tuple[Topic, ...] = (
    T(
        ("speculative decoding", "speculation"),
        (
            "Speculative decoding [lets|allows] a small model [guess|propose] [several|a few] "
            "tokens that a large model then checks in one pass.",
            "In speculative decoding a [fast|small] draft model runs ahead and the "
            "[target|large model] [verifies|checks] its guesses.",
        ),
        (
            "It [makes generation faster|saves time] without changing the [text|output|result].",
            "The large model reads many tokens at once for [almost the price|nearly the cost] "
            "of one.",
        ),
        (
            "If the draft is right three times out of four, [most passes|most steps] yield several "
            "tokens.",
            "Wrong guesses are [thrown away|dropped], so the output stays the same.",
        ),
    ),
    T(
        ("the draft model", "a draft model"),
        (
            "The draft model is a small, fast model that [proposes|guesses] the next [few|] "
            "tokens.",
            "A draft model [runs ahead|goes first] and [offers|proposes] tokens to the target.",
        ),
        (
            "It must be much [cheaper|faster] than the target, or there is nothing to [gain|win].",
            "The better it [agrees with|imitates] the target, the more tokens are accepted.",
        ),
        (
            "A draft with one tenth of the parameters is a [good|common] choice.",
            "It should share the [tokenizer|vocabulary] of the target.",
        ),
    ),
    T(
        ("the target model", "a target model"),
        (
            "The target model is the large model whose output you [want|asked for].",
            "The target [verifies|checks] the drafted tokens and has the last word.",
        ),
        ("It decides every token, so the quality [never|does not] [drop|change|suffer].",),
        (
            "After a wrong guess it [supplies|gives] the right token itself.",
            "It reads all drafted tokens in one [batch|forward pass].",
        ),
    ),
    T(
        ("the acceptance rate", "acceptance"),
        (
            "The acceptance rate is the share of drafted tokens that the target [keeps|accepts].",
            "Acceptance [tells|says] how often the draft was right: accepted tokens divided by "
            "drafted tokens.",
        ),
        (
            "A high rate means [many|more] tokens per pass and a [larger|better] speed-up.",
            "With a low rate the draft costs more than it [saves|brings].",
        ),
        (
            "Code and [lists|tables] often reach a high rate, [stories|free text] a lower one.",
            "If eight tokens are drafted and six are kept, the rate is 0.75.",
        ),
    ),
    T(
        ("verification", "the verify step"),
        (
            "Verification is one pass of the target over all drafted tokens.",
            "In the verify step the target computes its own choice at every "
            "[drafted position|place].",
        ),
        (
            "It [keeps|accepts] the longest prefix that agrees and [corrects|replaces] the first "
            "mistake.",
            "It makes sure that the output is what the target alone would [say|write].",
        ),
        ("Even when all guesses fail, it still yields one [token|new token].",),
    ),
    T(
        ("the KV cache", "a KV cache"),
        (
            "The KV cache [stores|holds|keeps] the keys and values of all [earlier|past] tokens.",
            "A KV cache is the memory of attention: keys and values for each [token|position].",
        ),
        (
            "Without it the model would have to read the whole text again for [each|every] token.",
            "It grows with the context and [takes|needs] a lot of memory.",
        ),
        (
            "After a rejected draft the cache is [cut|rolled back] to the last good position.",
            "It can be [quantised|stored in fewer bits] to save memory.",
        ),
    ),
    T(
        ("rollback", "rolling back"),
        (
            "Rollback removes rejected tokens from the KV cache.",
            "Rolling back means [cutting|shortening] the cache to the last accepted token.",
        ),
        ("Without rollback the model would see [tokens|words] that were never [accepted|said].",),
        (
            "It is cheap, because only the [end|tail] of the cache is [removed|dropped].",
            "Some models keep a running state and need a [checkpoint|copy] instead.",
        ),
    ),
    T(
        ("the draft window", "draft length"),
        (
            "The draft window is the number of tokens that are guessed [per round|at a time].",
            "Draft length says how [many tokens|far ahead] the small model goes before a check.",
        ),
        (
            "If it is too [long|large], guesses are wasted; if it is too [short|small], passes are "
            "wasted.",
        ),
        (
            "A good program [adapts|changes] the window while it runs.",
            "Four is a [good|safe] start.",
        ),
    ),
    T(
        ("quantisation", "quantization"),
        (
            "Quantisation stores the weights of a model in fewer bits.",
            "Quantisation [rounds|packs] weights to small integers with a shared scale.",
        ),
        (
            "A smaller file [loads faster|fits into less memory] and runs faster.",
            "It [trades|gives up] a little [quality|accuracy] for size and speed.",
        ),
        (
            "Q4_0 uses about four and a half bits per weight, Q8_0 eight and a half.",
            "Eight bits are almost [lossless|free of loss]; below four bits the loss can be "
            "[seen|felt].",
        ),
    ),
    T(
        ("GGUF", "the GGUF format"),
        (
            "GGUF is a file format for [models|weights] that run on your own machine.",
            "A GGUF file [holds|contains] the weights, the tokenizer and the settings of a model.",
        ),
        ("One file is all you need to [run|load|share] a model.",),
        (
            "Such a file ends in .gguf and can be mapped into memory.",
            "The name often tells the quantisation, such as Q4_0.",
        ),
    ),
    T(
        ("a token", "tokens"),
        (
            "A token is a piece of text: a word, a part of a word or a sign.",
            "Tokens are the [units|pieces] that a language model reads and writes.",
        ),
        ("Speed and context are [counted|measured] in tokens.",),
        ("A short word is often one token; a rare word is [split|cut] into several.",),
    ),
    T(
        ("the tokenizer", "a tokenizer"),
        (
            "The tokenizer [cuts|splits] text into tokens and joins tokens to text again.",
            "A tokenizer maps text to numbers and back.",
        ),
        (
            "Draft and target must [share|agree on] the tokenizer, so that their tokens mean the "
            "same.",
        ),
        ("Byte pair encoding starts from bytes and merges [common|frequent] pairs.",),
    ),
    T(
        ("the context", "the context length"),
        (
            "The context is the text that the model can see at once.",
            "The context length is the largest number of tokens a model can [see|read] at a time.",
        ),
        ("A longer context needs more memory for the [KV cache|cache].",),
        ("When the context is full, old text must be [dropped|cut] or the program stops.",),
    ),
    T(
        ("temperature", "the temperature"),
        (
            "Temperature [controls|sets] how bold the choice of the next token is.",
            "The temperature scales the scores before a token is drawn.",
        ),
        ("Low values give [steady|safe] text, high values give [varied|surprising] text.",),
        (
            "At temperature 0 the model always takes the best token.",
            "A value of 0.7 is a [common|good] choice for chat.",
        ),
    ),
    T(
        ("top-p", "nucleus sampling"),
        (
            "Top-p keeps the most likely tokens until their chances add up to p.",
            "Nucleus sampling draws from the smallest set of tokens that holds a share p.",
        ),
        ("It [cuts off|removes] the long tail of unlikely tokens.",),
        ("With p at 0.9 the last tenth of the [chance|mass] is ignored.",),
    ),
    T(
        ("top-k", "top-k sampling"),
        ("Top-k keeps the k most likely tokens and [drops|ignores] the rest.",),
        ("It [stops|keeps] the model from [picking|choosing] very unlikely tokens.",),
        ("With k at 1 it is the same as greedy decoding.",),
    ),
    T(
        ("a seed", "the seed"),
        (
            "A seed is the number from which all random choices [start|follow].",
            "The seed fixes the random numbers of a run.",
        ),
        ("With the same seed you get the same [text|output] again.",),
        ("Change the seed to get another [answer|version] of the text.",),
    ),
    T(
        ("greedy decoding", "greedy search"),
        ("Greedy decoding always takes the token with the highest score.",),
        ("It is simple and gives the same text [each|every] time.",),
        ("It is the same as temperature 0.",),
    ),
    T(
        ("perplexity", "the perplexity"),
        ("Perplexity [measures|tells] how surprised a model is by a text.",),
        ("A lower value means that the model [predicts|knows] the text better.",),
        ("A perplexity of 1 would mean that every token was [certain|known before].",),
    ),
    T(
        ("a language model", "language models"),
        (
            "A language model [predicts|guesses] the next token of a text.",
            "A language model is a program that continues text, one token at a time.",
        ),
        ("With it a computer can answer, [explain|summarise] and write code.",),
        ("It learns from many examples and can still be wrong.",),
    ),
    T(
        ("attention", "the attention layer"),
        ("Attention lets each token look at the tokens before it.",),
        ("It helps the model [copy|find|use] facts from the text.",),
        ("Several heads look for different things at the same time.",),
    ),
    T(
        ("an embedding", "embeddings"),
        ("An embedding is a list of numbers that stands for a token or a text.",),
        ("Texts with a similar meaning get similar numbers.",),
        ("The first layer of a model turns tokens into embeddings.",),
    ),
    T(
        ("a batch", "batching"),
        ("A batch is a group of tokens that the model [processes|reads] in one pass.",),
        ("The weights are read once for the whole batch, which saves time.",),
        ("Speculative decoding uses this: checking four tokens costs little more than one.",),
    ),
    T(
        ("prefill", "the prefill"),
        ("Prefill is the first pass, in which the model reads your prompt.",),
        ("It fills the KV cache before the first token is written.",),
        ("A long prompt makes the wait for the first token longer.",),
    ),
    T(
        ("latency", "the latency"),
        ("Latency is the time you wait for an answer.",),
        ("A short wait makes a chat feel [fast|alive].",),
        ("The time to the first token and the time per token both count.",),
    ),
    T(
        ("throughput", "the throughput"),
        ("Throughput is the number of tokens per second.",),
        ("It tells how much [work|text] a machine can do in a given time.",),
        ("More users at once raise the throughput and often the latency too.",),
    ),
    T(
        ("an n-gram draft", "n-gram drafting"),
        ("An n-gram draft guesses by looking for the same words earlier in the text.",),
        ("It costs almost nothing, because no second model is needed.",),
        ("It works well when an answer repeats parts of the [question|prompt].",),
    ),
    T(
        ("a draft tree", "tree drafting"),
        ("A draft tree offers several guesses for the same position.",),
        ("The target checks all branches at once and keeps the best [path|branch].",),
        ("A chain is a tree with one branch.",),
    ),
    T(
        ("the bonus token", "a bonus token"),
        ("The bonus token is the extra token the target gives when all drafts are accepted.",),
        ("It means that a pass with four right guesses yields five tokens.",),
        ("It comes for free, because the target has computed it anyway.",),
    ),
    T(
        ("rejection sampling", "speculative sampling"),
        ("Rejection sampling accepts a drafted token with a chance that depends on both models.",),
        ("It [keeps|leaves] the distribution of the target [unchanged|as it is].",),
        ("A rejected token is replaced by one drawn from what is left over.",),
    ),
    T(
        ("a GPU layer", "offloading layers"),
        ("Offloading puts some layers of a model on the graphics card.",),
        ("A graphics card is much faster, but its memory is small.",),
        ("If not all layers fit, the rest stays on the processor.",),
    ),
    T(
        ("memory mapping", "mmap"),
        ("Memory mapping lets a program use a file as if it were memory.",),
        ("A model starts faster, and two programs can share it.",),
        ("Only the parts that are needed are read from disk.",),
    ),
    T(
        ("a chat template", "chat templates"),
        ("A chat template turns a list of messages into one text for the model.",),
        ("With the wrong template a model gives bad answers.",),
        ("ChatML marks each message with a start and an end token.",),
    ),
    T(
        ("a stop token", "the stop token"),
        ("A stop token tells the program that the answer is complete.",),
        ("Without it the model would go on [for ever|until the context is full].",),
        ("In ChatML the end mark of a message is the stop token.",),
    ),
    T(
        ("a local model", "running models locally"),
        ("A local model runs on your own machine and not on a far server.",),
        ("Your text stays with you, and it works without a network.",),
        ("A small model needs only a few gigabytes of memory.",),
    ),
    T(
        ("overfitting", "an overfitted model"),
        ("Overfitting means that a model knows its examples by heart.",),
        ("Such a model fails on new questions.",),
        ("Held-out data shows whether it happens.",),
    ),
)


@dataclass(frozen=True)
class HowTo:
    """A task, its steps in order, and a closing hint."""

    task: str
    steps: tuple[str, ...]
    hint: str


H = HowTo
HOWTOS: tuple[HowTo, ...] = (
    H(
        "run a model on my machine",
        (
            "[Choose|Pick] a model that fits into your memory.",
            "[Download|Get] its GGUF file.",
            "Start the program with the [path|name] of the file.",
            "[Type|Write] your first message.",
        ),
        "[Begin|Start] with a small model.",
    ),
    H(
        "speed up generation",
        (
            "[Measure|Note] the speed without a draft.",
            "[Add|Choose] a small draft model.",
            "[Try|Test] a window of four tokens.",
            "[Compare|Look at] the acceptance rate.",
        ),
        "Keep the draft only if it is faster.",
    ),
    H(
        "choose a draft model",
        (
            "[Look for|Find] a model of the same family.",
            "Check that the tokenizer is the same.",
            "Take one with a tenth of the size.",
            "Measure the acceptance rate on your own text.",
        ),
        "A faster draft often beats a better one.",
    ),
    H(
        "save memory",
        (
            "Use a smaller quantisation.",
            "[Shorten|Reduce] the context.",
            "[Quantise|Pack] the KV cache.",
            "Close other programs.",
        ),
        "Check the quality after each step.",
    ),
    H(
        "get the same answer twice",
        (
            "Set a fixed seed.",
            "Use the same temperature.",
            "Use the same model file.",
            "Keep the prompt unchanged.",
        ),
        "At temperature 0 no seed is needed.",
    ),
    H(
        "make tea",
        (
            "[Boil|Heat] the water.",
            "[Warm|Rinse] the pot.",
            "Put the leaves [in|into the pot].",
            "Pour the water over the leaves.",
            "Wait for three minutes.",
        ),
        "Do not wait too long, or it gets bitter.",
    ),
    H(
        "plant a tree",
        (
            "Dig a wide hole.",
            "Set the tree in the middle.",
            "Fill the hole with soil.",
            "Press the soil down.",
            "Water it well.",
        ),
        "Water it again every few days.",
    ),
    H(
        "bake bread",
        (
            "Mix flour, water, salt and yeast.",
            "Knead the dough.",
            "Let it rest for an hour.",
            "Form a loaf.",
            "Bake it until it is brown.",
        ),
        "Let it cool before you cut it.",
    ),
    H(
        "write a good prompt",
        (
            "Say what you want in one sentence.",
            "Give an example.",
            "Name the form of the answer.",
            "Read the result and change one thing.",
        ),
        "Short and clear beats long and vague.",
    ),
    H(
        "repair a flat tyre",
        (
            "Take off the wheel.",
            "Pull out the tube.",
            "Find the hole under water.",
            "Dry the place and put on a patch.",
            "Put everything back.",
        ),
        "Look for the nail that made the hole.",
    ),
    H(
        "learn a song",
        (
            "Listen to it twice.",
            "Learn the first line.",
            "Add one line at a time.",
            "Sing it from start to end.",
        ),
        "A little every day is best.",
    ),
    H(
        "clean a window",
        (
            "Fill a bucket with warm water.",
            "Add a drop of soap.",
            "Wipe the glass from the top.",
            "Dry it with a cloth.",
        ),
        "Do it on a cloudy day.",
    ),
    H(
        "pack for a trip",
        (
            "Write a list.",
            "Lay everything on the bed.",
            "Leave half of it at home.",
            "Put heavy things at the bottom.",
        ),
        "Keep your papers in the top pocket.",
    ),
    H(
        "test a program",
        (
            "Write down what it should do.",
            "Give it a simple input.",
            "Give it a strange input.",
            "Compare the results with your list.",
        ),
        "Run the tests after every change.",
    ),
)
