//! What the sampling values mean. Backends that sample on the host call [`sample`]; the others are tested
//! against it.

/// Sampling values of one request. The defaults are greedy decoding with nothing else on.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; `0` takes the best token (the lowest id of equal ones).
    pub temperature: f32,
    /// Keeps the `top_k` best tokens; `0` keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of best tokens whose probability reaches `top_p`; `1` keeps all.
    pub top_p: f32,
    /// Keeps the tokens with at least `min_p` times the best one's probability; `0` keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window (CTRL, arXiv:1909.05858); `1` is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each occurrence in the window (OpenAI's definition).
    pub frequency_penalty: f32,
    /// Subtracted if the token occurs in the window.
    pub presence_penalty: f32,
    /// How many of the last tokens the penalties look at; `None` is the whole sequence.
    pub penalty_window: Option<u32>,
    /// Added to the logits of given tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Random stream; the same seed gives the same text.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}
