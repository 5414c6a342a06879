//! Rerankers that are chat models: the probability of `yes` as the answer to the question whether a document fits a query
//! (Qwen3-Reranker).

use crate::{
    chat::ChatPrompt,
    load::Model,
    tokenizer::{Cut, Tokenizer},
};

/// The prompt of Qwen3-Reranker, as its card has it.
const TEMPLATE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
    Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n\
    <Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// The instruction of its card, where a request has none.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// Part of the names of these models, in the spelling of [`folded`].
const NAME: &str = "qwen3reranker";

/// Part of a template that requests one of the two words.
const QUESTION: &str = "the answer can only be \"yes\" or \"no\"";

/// Most bytes of a file's template.
const MAX_TEMPLATE: usize = 16 << 10;

/// A chat model that judges documents.
#[derive(Clone, Debug)]
pub struct Judge {
    /// With places for `{query}`, `{document}` and `{instruction}`.
    template: String,
    yes: Row,
    no: Row,
    scale: f32,
    soft_cap: Option<f32>,
}

/// A row of the model's head.
#[derive(Clone, Debug)]
struct Row {
    weights: Vec<f32>,
    bias: f32,
}

/// Returns the template if a model of these names and chat templates judges documents.
pub(crate) fn template_of<'n>(
    mut names: impl Iterator<Item = &'n str>,
    templates: &[(String, String)],
) -> Option<String> {
    let named = templates.iter().find(|(name, _)| name == "rerank").map(|(_, source)| source);
    let named = named.filter(|source| {
        source.len() <= MAX_TEMPLATE && source.contains("{query}") && source.contains("{document}")
    });
    if let Some(source) = named {
        return Some(source.replace(INSTRUCTION, "{instruction}"));
    }
    let asks = || templates.iter().any(|(_, source)| source.contains(QUESTION));
    (names.any(|name| folded(name).contains(NAME)) || asks()).then(|| TEMPLATE.to_owned())
}

/// Returns a name without case and separators.
fn folded(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

impl Judge {
    /// Returns the judge that a model is, if it is one by its files or by `name`.
    ///
    /// # Errors
    /// A head that cannot be read, or a vocabulary without the two words.
    pub(crate) fn of(model: &Model, name: &str) -> Result<Option<Self>, String> {
        let template = model.judge_template.clone();
        let Some(template) = template.or_else(|| template_of([name].into_iter(), &[])) else {
            return Ok(None);
        };
        let head = model.program.head().ok_or("the model has no head")?;
        let matrix = model.weights.matrix(head.linear.matrix);
        let mut buffer = Vec::new();
        let mut row = |word: &str| {
            let token = model.tokenizer.token_id(word).map(|token| token as usize);
            let Some(token) = token.filter(|&token| token < matrix.rows) else {
                return Err(format!(
                    "the model's vocabulary has no token `{word}`, which a reranker of its kind needs"
                ));
            };
            let mut weights = vec![0.0; matrix.cols];
            matrix.decode_row(token, &mut buffer, &mut weights).map_err(|error| error.to_string())?;
            let bias = head.linear.bias.map_or(0.0, |bias| model.weights.vector(bias)[token]);
            Ok(Row { weights, bias })
        };
        let (yes, no) = (row("yes")?, row("no")?);
        Ok(Some(Self { template, yes, no, scale: head.scale, soft_cap: head.soft_cap }))
    }

    /// Returns the tokens of the question about a document. A document that is too long for `most` tokens is cut if
    /// `cut` says where.
    ///
    /// # Errors
    /// The number of tokens, if they are more than `most`.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        (query, document): (&str, &str),
        instruction: Option<&str>,
        most: usize,
        cut: Option<Cut>,
    ) -> Result<Vec<u32>, usize> {
        let document = cut.map_or(document, |cut| tokenizer.part(document, most, cut));
        // The end of the question begins with a control token, so its tokens do not depend on the document.
        let (question, end) = self.template.split_once("{document}").unwrap_or((&self.template, ""));
        let mut prompt = ChatPrompt::default();
        let mut rest = question;
        while let Some(at) = rest.find('{') {
            prompt.text.push_str(&rest[..at]);
            rest = &rest[at..];
            let values = [("{query}", query), ("{instruction}", instruction.unwrap_or(INSTRUCTION))];
            match values.into_iter().find(|(place, _)| rest.starts_with(place)) {
                Some((place, value)) => {
                    prompt.push_literal(value);
                    rest = &rest[place.len()..];
                }
                None => {
                    prompt.text.push('{');
                    rest = &rest[1..];
                }
            }
        }
        prompt.text.push_str(rest);
        let before = prompt.clone();
        prompt.push_literal(document);
        let mut ids = tokenizer.encode_parts(&prompt);
        let end = tokenizer.encode_parts(&ChatPrompt { text: end.to_owned(), ..ChatPrompt::default() });
        let tokens = ids.len() + end.len();
        if tokens > most {
            let (Some(cut), Some(room)) = (cut, most.checked_sub(end.len())) else { return Err(tokens) };
            // The query stays whole; a document of which nothing would be left is not judged.
            let before = tokenizer.encode_parts(&before).len();
            if before >= room {
                return Err(tokens);
            }
            let excess = ids.len() - room;
            let from = if cut == Cut::Start { before.min(ids.len() - excess) } else { room };
            ids.drain(from..from + excess);
        }
        ids.extend(end);
        Ok(ids)
    }

    /// Returns the logit of `yes` less that of `no`, from the hidden state of the last token.
    pub fn logit(&self, hidden: &[f32]) -> f32 {
        let logit = |row: &Row| {
            let sum: f64 = row.weights.iter().zip(hidden).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            let logit = (sum as f32 + row.bias) * self.scale;
            self.soft_cap.map_or(logit, |cap| cap * (logit / cap).tanh())
        };
        logit(&self.yes) - logit(&self.no)
    }

    /// Returns the probability of `yes` against `no`.
    pub fn score(&self, hidden: &[f32]) -> f32 {
        1.0 / (1.0 + (-self.logit(hidden)).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judges_are_known_by_name_and_template() {
        let template = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let of =
            |names: &[&str], templates: &[(String, String)]| template_of(names.iter().copied(), templates);
        for name in ["Qwen/Qwen3-Reranker-0.6B", "qwen3_reranker:q8_0", "Qwen3 Reranker 4B"] {
            assert_eq!(of(&["x", name], &[]).as_deref(), Some(TEMPLATE), "{name}");
        }
        assert_eq!(of(&["Qwen3-Embedding-0.6B", "bge-reranker-base"], &[]), None);
        let asks = template("default", "Note that the answer can only be \"yes\" or \"no\".");
        assert_eq!(of(&[], &[asks]).as_deref(), Some(TEMPLATE));
        let own = template("rerank", &format!("{INSTRUCTION}: {{query}} {{document}}?"));
        assert_eq!(of(&[], &[own]).as_deref(), Some("{instruction}: {query} {document}?"));
        assert_eq!(of(&[], &[template("rerank", "{query}")]), None);
    }
}
