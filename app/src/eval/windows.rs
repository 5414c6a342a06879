//! Scored tokens of a perplexity: the windows of llama.cpp's `llama-perplexity` (tools/perplexity/perplexity.cpp), so
//! that the results are comparable.

use std::fmt;

/// One window. The model reads all of it; its end is scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens of the window.
    pub tokens: Vec<u32>,
    /// Position of the first token that predicts: `tokens[score_from + 1..]` are scored.
    pub score_from: usize,
}

/// Arrangement of windows over the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Tokens in a window.
    pub window: usize,
    /// Distance between the starts of two windows.
    pub step: usize,
    /// Position of the first token that predicts.
    score_from: usize,
    /// True if BOS replaces the first token of each window.
    begins_with_bos: bool,
}

/// Error for a text that is too short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooShort {
    /// Tokens in the text.
    pub tokens: usize,
    /// Tokens in a window.
    pub window: usize,
}

impl fmt::Display for TooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, window } = self;
        write!(f, "the text has {tokens} tokens, but windows of {window} need at least {}", 2 * window)
    }
}

impl Windows {
    /// Returns adjacent windows of `ctx` tokens, whose second half is scored.
    pub fn adjacent(ctx: usize) -> Self {
        Self { window: ctx, step: ctx, score_from: ctx / 2, begins_with_bos: true }
    }

    /// Returns overlapping windows, `stride` tokens apart, whose last `stride` tokens are scored. As in
    /// llama-perplexity, the context grows by half a stride, is rounded up, and the first token of each window is not
    /// replaced.
    pub fn strided(ctx: usize, stride: usize) -> Self {
        let window = (ctx + stride / 2).next_multiple_of(256).max(stride + 1);
        Self { window, step: stride, score_from: window - stride - 1, begins_with_bos: false }
    }

    /// Cuts the text into at most `most` windows. `bos` is the initial token of every text, if the model has one.
    ///
    /// # Errors
    /// [`TooShort`]
    pub fn cut<'a>(
        &self,
        tokens: &'a [u32],
        bos: Option<u32>,
        most: Option<usize>,
    ) -> Result<impl ExactSizeIterator<Item = Window> + use<'a>, TooShort> {
        let Self { window, step, score_from, begins_with_bos } = *self;
        let first = bos.filter(|_| begins_with_bos);
        if tokens.len() < 2 * window {
            return Err(TooShort { tokens: tokens.len(), window });
        }
        // The number of windows is llama-perplexity's, which may omit the last complete overlapping window.
        let count =
            if step == window { tokens.len() / window } else { (tokens.len() - window).div_ceil(step) };
        Ok((0..count.min(most.unwrap_or(count))).map(move |i| {
            let mut tokens = tokens[i * step..][..window].to_vec();
            if let Some(first) = first {
                tokens[0] = first;
            }
            Window { tokens, score_from }
        }))
    }

    /// Returns the number of scored tokens of each window.
    pub fn scored(&self) -> usize {
        self.window - self.score_from - 1
    }
}

/// Mean and variance of the negative log-likelihoods of scored tokens, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Likelihood {
    count: u64,
    sum: f64,
    squares: f64,
}

impl Likelihood {
    /// Adds log-probabilities.
    pub fn add(&mut self, logprobs: &[f32]) {
        for &logprob in logprobs {
            let cost = -f64::from(logprob);
            self.sum += cost;
            self.squares += cost * cost;
        }
        self.count += logprobs.len() as u64;
    }

    /// Returns the number of scored tokens.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean negative log-likelihood per token, in nats.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Returns `exp(mean)`.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Returns the standard error of the perplexity to first order: that of the mean times the perplexity. It is 0 for
    /// one token.
    pub fn error(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let variance = (self.squares / self.count as f64 - self.mean().powi(2)).max(0.0);
        (variance / (self.count - 1) as f64).sqrt() * self.perplexity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(arrangement: Windows, len: u32, bos: Option<u32>, most: Option<usize>) -> Vec<(u32, u32, usize)> {
        let text: Vec<u32> = (100..100 + len).collect();
        let windows = arrangement.cut(&text, bos, most).unwrap();
        windows.map(|w| (w.tokens[0], *w.tokens.last().unwrap(), w.tokens.len() - 1 - w.score_from)).collect()
    }

    #[test]
    fn adjacent_windows_begin_with_bos_and_score_their_second_half() {
        let arrangement = Windows::adjacent(8);
        assert_eq!(cut(arrangement, 16, Some(1), None), [(1, 107, 3), (1, 115, 3)]);
        // An incomplete window is dropped.
        assert_eq!(cut(arrangement, 23, Some(1), None).len(), 2);
        assert_eq!(cut(arrangement, 40, Some(1), Some(3)).len(), 3);
        assert_eq!(cut(arrangement, 16, None, Some(1)), [(100, 107, 3)]);
        assert_eq!(Windows::adjacent(9).scored(), 4);
        assert_eq!(arrangement.cut(&[0; 15], None, None).err(), Some(TooShort { tokens: 15, window: 8 }));
    }

    #[test]
    fn overlapping_windows_score_each_token_once() {
        let arrangement = Windows::strided(512, 256);
        assert_eq!((arrangement.window, arrangement.step, arrangement.scored()), (768, 256, 256));
        let windows = cut(arrangement, 2000, Some(1), None);
        assert_eq!(windows.len(), 5);
        assert_eq!(windows[4], (100 + 4 * 256, 100 + 4 * 256 + 767, 256));
        // A stride larger than the context leaves tokens to predict from.
        assert_eq!(Windows::strided(4, 600).window, 601);
    }

    #[test]
    fn the_summary_is_mean_and_standard_error() {
        let mut likelihood = Likelihood::default();
        likelihood.add(&[-1.0, -2.0]);
        likelihood.add(&[-3.0]);
        assert_eq!((likelihood.count(), likelihood.mean()), (3, 2.0));
        // Variance 2/3, over n - 1 = 2, under the root: 0.57735.
        assert!((likelihood.error() / likelihood.perplexity() - 0.577_350_27).abs() < 1e-6);
    }
}
