//! Selection of the files of a repository that are a supported model.

use std::collections::BTreeMap;

use super::{Choice, RemoteFile, Repository};
use crate::{
    adapter::{belongs_to_adapter, is_adapter},
    error::LibraryError,
    import::{
        self, TORCH_WEIGHTS, belongs_to_folder, gguf_stem, is_file_name, is_safetensors, is_weights, split,
    },
    record::Format,
};

/// Files to download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) format: Format,
    /// The tag of the model's name.
    pub(crate) tag: String,
    /// Its files, in order.
    pub(crate) files: Vec<RemoteFile>,
}

/// Quantizations in order of preference without an explicit choice: the usual compromise, then a nearly lossless one,
/// then those closest to these two. `Q4` stands for names without a variant.
const PREFERRED: [&str; 39] = [
    "Q4_K_M", "Q4_K_L", "Q4_K_XL", "Q4_K", "Q4", "Q8_0", "Q8_K_XL", "Q8", "Q5_K_M", "Q5_K_L", "Q5_K_XL",
    "Q5_K", "Q5", "Q4_K_S", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q6", "Q5_K_S", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS",
    "MXFP4", "Q5_0", "Q5_1", "Q3_K_L", "Q3_K_XL", "Q3_K_M", "Q3_K", "Q3", "Q3_K_S", "BF16", "F16", "F32",
    "Q2_K", "Q2_K_L", "Q2_K_XL", "Q2",
];

/// Formats without quantization. They are selected without an explicit choice only if no other file could be smaller.
const WHOLE: [&str; 3] = ["BF16", "F16", "F32"];

/// The tag of a model in safetensors, for repositories that have both.
const SAFETENSORS: &str = "safetensors";

/// A GGUF model of a repository.
#[derive(Debug)]
struct Candidate<'a> {
    /// `Q4_K_M`; `None` if the name does not contain it.
    quantization: Option<String>,
    /// The file's name without `.gguf`, number and count.
    stem: &'a str,
    files: Vec<&'a RemoteFile>,
}

/// Selects the requested files, or the best ones without a request.
pub(crate) fn choose(repository: &Repository, choice: Option<&Choice>) -> Result<Chosen, LibraryError> {
    let candidates = candidates(&repository.files);
    let folder = folder(&repository.files).or_else(|| adapter(&repository.files));
    let refuse = |problem: String, choices: Vec<String>| LibraryError::Choice {
        repo: repository.name.clone(),
        problem,
        choices,
    };
    let all = || {
        let ggufs = candidates.iter().map(Candidate::label);
        ggufs.chain(folder.is_some().then(|| SAFETENSORS.to_owned())).collect::<Vec<_>>()
    };
    let matching: Vec<&Candidate<'_>> = match choice {
        None => match preferred(&candidates) {
            Some(found) => found,
            None => candidates.iter().collect(),
        },
        Some(Choice::Tag(tag)) if tag.eq_ignore_ascii_case(SAFETENSORS) => Vec::new(),
        Some(Choice::Tag(tag)) => tagged(&candidates, tag),
        Some(Choice::File(path)) if is_in_folder(path) => Vec::new(),
        Some(Choice::File(path)) => {
            candidates.iter().filter(|c| c.files.iter().any(|file| file.path == *path)).collect()
        }
    };
    match (&matching[..], &folder) {
        ([one], _) => Ok(one.chosen(&repository.files)),
        // A tag that is no GGUF file's may still not mean the folder.
        ([], Some(files)) if is_about_folder(choice) => Ok(Chosen {
            format: Format::Safetensors,
            tag: crate::name::LATEST.to_owned(),
            files: files.clone(),
        }),
        ([], _) => Err(match choice {
            Some(Choice::Tag(tag)) => refuse(format!("nothing in it is `{tag}`"), all()),
            Some(Choice::File(path)) => refuse(format!("it has no model in a file `{path}`"), all()),
            None => refuse(
                "it has neither a GGUF file, nor config.json with model.safetensors or pytorch_model.bin, nor adapter_config.json with \
                 adapter_model.safetensors"
                    .to_owned(),
                Vec::new(),
            ),
        }),
        (several, _) => Err(refuse(
            "say which one, after a colon".to_owned(),
            several.iter().map(|candidate| candidate.distinct_label(several)).collect(),
        )),
    }
}

/// Returns true for a file of a model's or an adapter's folder.
fn is_in_folder(path: &str) -> bool {
    belongs_to_folder(path) || belongs_to_adapter(path)
}

fn is_about_folder(choice: Option<&Choice>) -> bool {
    match choice {
        None => true,
        Some(Choice::Tag(tag)) => tag.eq_ignore_ascii_case(SAFETENSORS) || tag.eq_ignore_ascii_case("latest"),
        Some(Choice::File(path)) => is_in_folder(path),
    }
}

/// Returns the candidates of the most preferred quantization; `None` where names do not decide.
fn preferred<'a, 'b>(candidates: &'b [Candidate<'a>]) -> Option<Vec<&'b Candidate<'a>>> {
    let of = |wanted: &str| -> Vec<_> {
        candidates.iter().filter(|c| c.quantization.as_deref() == Some(wanted)).collect()
    };
    let wanted = PREFERRED.iter().find(|wanted| !of(wanted).is_empty())?;
    // `model.gguf` beside `model-F16.gguf` is usually smaller, but the names do not state it.
    let unclear = WHOLE.contains(wanted) && candidates.iter().any(|c| c.quantization.is_none());
    (!unclear).then(|| of(wanted))
}

/// Returns the candidates that a tag means: by quantization, by whole name, or else by the end of the name.
fn tagged<'a, 'b>(candidates: &'b [Candidate<'a>], tag: &str) -> Vec<&'b Candidate<'a>> {
    let stem = gguf_stem(tag).unwrap_or(tag);
    let by =
        |test: &dyn Fn(&Candidate<'_>) -> bool| candidates.iter().filter(|c| test(c)).collect::<Vec<_>>();
    let same_name = by(&|c| c.stem.eq_ignore_ascii_case(stem));
    if !same_name.is_empty() {
        return same_name;
    }
    let wanted = canonical(&tag.to_uppercase());
    let same_quantization = by(&|c| c.quantization.as_ref() == Some(&wanted));
    if !same_quantization.is_empty() {
        return same_quantization;
    }
    if tag.eq_ignore_ascii_case(crate::name::LATEST) {
        return preferred(candidates).unwrap_or_else(|| by(&|_| true));
    }
    by(&|c| c.stem.to_lowercase().ends_with(&stem.to_lowercase()))
}

impl Candidate<'_> {
    fn label(&self) -> String {
        self.quantization.clone().unwrap_or_else(|| self.stem.to_owned())
    }

    /// Returns a label that is different from those of the others.
    fn distinct_label(&self, others: &[&Self]) -> String {
        let same = others.iter().filter(|other| other.label() == self.label()).count();
        if same > 1 { self.stem.to_owned() } else { self.label() }
    }

    /// Returns the files of the model, and last its projector for images and its assistant.
    fn chosen(&self, all: &[RemoteFile]) -> Chosen {
        let tag = match &self.quantization {
            Some(quantization) => quantization.clone(),
            None => crate::name::LATEST.to_owned(),
        };
        let assistant =
            if import::is_assistant(self.stem) { None } else { self.companion(all, is_assistant) };
        let companions = self.companion(all, is_projector).into_iter().chain(assistant);
        let files = self.files.iter().copied().chain(companions);
        Chosen { format: Format::Gguf, tag, files: files.cloned().collect() }
    }

    /// Returns the file of a kind that belongs to the model: of those in the deepest of its folders, the one whose weights have the closest
    /// number of bits. BF16 comes before F16, and F16 before others of the same distance.
    fn companion<'a>(&self, all: &'a [RemoteFile], is_kind: fn(&str) -> bool) -> Option<&'a RemoteFile> {
        // Assistants in other formats are often in a folder of their own.
        let folder_of = |path: &'a str| {
            let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
            let (parent, last) = folder.rsplit_once('/').unwrap_or(("", folder));
            (if last == "MTP" { parent } else { folder }, name)
        };
        let (own, _) = self.files.first()?.path.rsplit_once('/').unwrap_or(("", ""));
        let contains = |folder: &str| {
            folder.is_empty()
                || own == folder
                || own.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
        };
        let bits = self.quantization.as_deref().map_or(16, bits);
        let rank = |file: &&'a RemoteFile| {
            let (folder, name) = folder_of(&file.path);
            let format = gguf_stem(name).and_then(quantization);
            let distance = format.as_deref().map_or(16, self::bits).abs_diff(bits);
            let order =
                ["BF16", "F16"].into_iter().position(|other| format.as_deref() == Some(other)).unwrap_or(2);
            (std::cmp::Reverse(folder.len()), distance, order, &file.path)
        };
        let found = all.iter().filter(|file| {
            let (folder, name) = folder_of(&file.path);
            is_kind(name) && is_file_name(name) && contains(folder)
        });
        found.min_by_key(rank)
    }
}

/// Returns true for a file whose name says that it is a projector for images.
fn is_projector(name: &str) -> bool {
    gguf_stem(name).is_some() && import::is_projector(name)
}

/// Returns true for a file whose name says that it is an assistant.
fn is_assistant(name: &str) -> bool {
    gguf_stem(name).is_some() && import::is_assistant(name)
}

/// Returns the bits of a weight in a quantization, by its name.
fn bits(quantization: &str) -> u32 {
    let digits: String =
        quantization.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(16)
}

/// Returns the GGUF models by name, without auxiliary files (projectors for images, importance matrices, assistants beside models)
/// and incomplete sets.
fn candidates(files: &[RemoteFile]) -> Vec<Candidate<'_>> {
    // Parts of one set have one folder, name and count.
    let mut sets: BTreeMap<(&str, &str, u32), Vec<&RemoteFile>> = BTreeMap::new();
    for file in files {
        let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let Some(stem) = gguf_stem(name) else { continue };
        let lower = name.to_lowercase();
        // `m-Q4_K_M-imatrix.gguf` is a model that was quantized with an importance matrix, and not the matrix.
        let is_matrix = lower.contains("imatrix") && quantization(stem).is_none();
        if !is_file_name(name) || is_projector(name) || is_matrix {
            continue;
        }
        let (stem, count) = split(stem).map_or((stem, 1), |(name, _, count)| (name, count));
        sets.entry((folder, stem, count)).or_default().push(file);
    }
    let candidate = |((folder, stem, count), mut files): ((&str, _, u32), Vec<_>)| {
        files.sort_by(|a: &&RemoteFile, b| a.path.cmp(&b.path));
        // The folder may name the quantization: `Q4_K_M/model-00001-of-00002.gguf`.
        let quantization = quantization(stem).or_else(|| quantization(folder));
        (files.len() == count as usize).then_some(Candidate { quantization, stem, files })
    };
    let mut all: Vec<_> = sets.into_iter().filter_map(candidate).collect();
    if all.iter().any(|candidate| !import::is_assistant(candidate.stem)) {
        all.retain(|candidate| !import::is_assistant(candidate.stem));
    }
    all
}

/// Returns the last quantization that a name mentions: `Q4_K_M` of `llama-3.2-1b.q4_k_m` and of `m-Q4_K_M-imat`, `Q4` of
/// `m-q4`, `Q4_K_XL` of `m-UD-Q4_K_XL`.
fn quantization(name: &str) -> Option<String> {
    /// Suffixes that may follow `Q4` after an underscore.
    const SUFFIXES: [&str; 21] = [
        "0", "1", "2", "4", "8", "K", "KS", "KSS", "KT", "KV", "L", "M", "NL", "R4", "R8", "S", "XL", "XS",
        "XXL", "XXS", "P",
    ];
    let is_head = |part: &str| {
        let digits = part.strip_prefix('I').or_else(|| part.strip_prefix('T')).unwrap_or(part);
        let digit = digits.strip_prefix('Q').unwrap_or_default();
        (digit.len() == 1 && digit.bytes().all(|b| b.is_ascii_digit()))
            || matches!(part, "BF16" | "F16" | "F32" | "FP16" | "FP32" | "MXFP4")
    };
    let upper = name.to_uppercase();
    upper.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').find_map(|word| {
        let parts: Vec<&str> = word.split('_').collect();
        let head = parts.iter().rposition(|part| is_head(part))?;
        let suffixes = parts[head + 1..].iter().take_while(|part| SUFFIXES.contains(part)).count();
        Some(canonical(&parts[head..=head + suffixes].join("_")))
    })
}

/// Returns the usual way to write a quantization that has several.
fn canonical(upper: &str) -> String {
    match upper {
        "FP16" => "F16",
        "FP32" => "F32",
        other => other,
    }
    .to_owned()
}

/// Returns the model in safetensors, or else in PyTorch's format, at the repository's root.
fn folder(files: &[RemoteFile]) -> Option<Vec<RemoteFile>> {
    let wanted = |file: &&RemoteFile| belongs_to_folder(&file.path);
    let mut chosen: Vec<RemoteFile> = files.iter().filter(wanted).cloned().collect();
    let has = |name: &str| chosen.iter().any(|file| file.path == name);
    if !has("config.json") || !chosen.iter().any(|file| is_weights(&file.path)) {
        return None;
    }
    // Copies of what is there in safetensors, also in folders of modules.
    let names: Vec<String> = chosen.iter().map(|file| file.path.clone()).collect();
    let is_copy = |path: &str| match path.strip_suffix(TORCH_WEIGHTS) {
        Some("") => names.iter().any(|name| is_safetensors(name)),
        Some(module) => names.contains(&format!("{module}model.safetensors")),
        None => false,
    };
    chosen.retain(|file| !is_copy(&file.path));
    let has = |name: &str| chosen.iter().any(|file| file.path == name);
    if has("model.safetensors") && !has("model.safetensors.index.json") {
        chosen.retain(|file| !is_weights(&file.path) || file.path == "model.safetensors");
    }
    chosen.sort_by(|a, b| a.path.cmp(&b.path));
    Some(chosen)
}

/// Returns the adapter at the repository's root.
fn adapter(files: &[RemoteFile]) -> Option<Vec<RemoteFile>> {
    let mut chosen: Vec<_> = files.iter().filter(|file| belongs_to_adapter(&file.path)).cloned().collect();
    chosen.sort_by(|a, b| a.path.cmp(&b.path));
    is_adapter(chosen.iter().map(|file| file.path.as_str())).then_some(chosen)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::{super::Check, *};

    fn repository(paths: &[&str]) -> Repository {
        let file =
            |path: &&str| RemoteFile { path: (*path).to_owned(), size: 1, check: Check::Git("0".repeat(40)) };
        Repository { name: "o/r".into(), commit: "c".into(), files: paths.iter().map(file).collect() }
    }

    fn check(paths: &[&str], choice: Option<Choice>, expected: Expect) {
        let found = match choose(&repository(paths), choice.as_ref()) {
            Ok(chosen) => {
                let files: Vec<_> = chosen.files.iter().map(|file| file.path.as_str()).collect();
                format!("{}: {}", chosen.tag, files.join(" "))
            }
            Err(error) => error.to_string(),
        };
        expected.assert_eq(&found);
    }

    fn tag(tag: &str) -> Option<Choice> {
        Some(Choice::Tag(tag.to_owned()))
    }

    const USUAL: [&str; 6] =
        ["README.md", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "m.imatrix.gguf"];

    #[test]
    fn the_sensible_quantization_is_taken_unless_one_is_named() {
        check(&USUAL, None, expect!["Q4_K_M: m-Q4_K_M.gguf mmproj-F16.gguf"]);
        check(&USUAL, tag("q8_0"), expect!["Q8_0: m-Q8_0.gguf mmproj-F16.gguf"]);
        check(&USUAL, tag("latest"), expect!["Q4_K_M: m-Q4_K_M.gguf mmproj-F16.gguf"]);
        check(&USUAL, tag("m-Q2_K.gguf"), expect!["Q2_K: m-Q2_K.gguf mmproj-F16.gguf"]);
        check(&USUAL, Some(Choice::File("m-Q8_0.gguf".into())), expect!["Q8_0: m-Q8_0.gguf mmproj-F16.gguf"]);
        check(&["a.q2_k.gguf", "a.q8_0.gguf"], None, expect!["Q8_0: a.q8_0.gguf"]);
        check(&["model.gguf"], None, expect!["latest: model.gguf"]);
        check(&["x-UD-IQ2_XXS.gguf"], None, expect!["IQ2_XXS: x-UD-IQ2_XXS.gguf"]);
        check(&USUAL, tag("fp16"), expect!["o/r: nothing in it is `fp16`; there is Q2_K, Q4_K_M, Q8_0"]);
        check(&["m-fp16.gguf", "m-q4.gguf"], tag("F16"), expect!["F16: m-fp16.gguf"]);
        check(&["m-UD-Q4_K_XL.gguf", "m-F16.gguf"], tag("UD-Q4_K_XL"), expect!["Q4_K_XL: m-UD-Q4_K_XL.gguf"]);
    }

    #[test]
    fn names_that_say_less_or_more_never_lead_to_the_largest_file() {
        // The first of each row must be selected.
        for row in [
            &["M-q4.gguf", "M-fp16.gguf"][..],
            &["m-Q4_K_M-imat.gguf", "m-F16.gguf"],
            &["m-Q4_K_M-imatrix.gguf", "m-F16.gguf", "m.imatrix.gguf"],
            &["m.q4_k_m.gguf", "m.bf16.gguf", "m.q2_k.gguf"],
            &["ggml_model_q4_0.gguf", "ggml_model_f16.gguf"],
            &["m-iq4_xs.gguf", "m-f16.gguf", "m-iq2_xxs.gguf"],
            &["m-UD-Q4_K_XL.gguf", "m-BF16.gguf", "m-UD-Q8_K_XL.gguf"],
            &["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-Q4_K_S.gguf"],
            &["m-Q4_K_M-v2.gguf", "m-F32-v2.gguf"],
            &["m-mxfp4.gguf", "m-F16.gguf"],
            &["Q8/m.gguf", "fp16/m.gguf"],
            &["m-q4-00001-of-00001.gguf", "m-fp16.gguf"],
            &["m.i1-Q4_K_M.gguf", "m.f16.gguf"],
            &["m-Q4_0_4_4.gguf", "m-Q2_K.gguf.part1of2"],
        ] {
            let mut shuffled = row.to_vec();
            shuffled.reverse();
            let chosen =
                choose(&repository(&shuffled), None).unwrap_or_else(|error| panic!("{row:?}: {error}"));
            assert_eq!(chosen.files[0].path, row[0], "{row:?}");
        }
        let names = ["model.gguf", "model-F16.gguf"];
        check(&names, None, expect!["o/r: say which one, after a colon; there is model, F16"]);
        for (name, wanted) in [
            ("a.q2_k", Some("Q2_K")),
            ("phi-3-q4", Some("Q4")),
            ("m-Q4_0_4_8", Some("Q4_0_4_8")),
            ("m-IQ4_KSS", Some("IQ4_KSS")),
            ("m-tq1_0", Some("TQ1_0")),
            ("m-Q6_K_L", Some("Q6_K_L")),
            ("qwen3-7b", None),
            ("m-q4x", None),
            ("quick-f160", None),
        ] {
            assert_eq!(quantization(name).as_deref(), wanted, "{name}");
        }
    }

    #[test]
    fn what_is_not_clear_is_listed() {
        check(&USUAL, tag("Q5_K_M"), expect!["o/r: nothing in it is `Q5_K_M`; there is Q2_K, Q4_K_M, Q8_0"]);
        check(
            &["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"],
            None,
            expect!["o/r: say which one, after a colon; there is a-Q4_K_M, b-Q4_K_M"],
        );
        check(&["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], tag("b-Q4_K_M"), expect!["Q4_K_M: b-Q4_K_M.gguf"]);
        check(&["a.gguf", "b.gguf"], None, expect!["o/r: say which one, after a colon; there is a, b"]);
        check(
            &["tf_model.h5", "config.json"],
            None,
            expect![
                "o/r: it has neither a GGUF file, nor config.json with model.safetensors or pytorch_model.bin, nor adapter_config.json with adapter_model.safetensors"
            ],
        );
        check(
            &USUAL,
            Some(Choice::File("x.gguf".into())),
            expect!["o/r: it has no model in a file `x.gguf`; there is Q2_K, Q4_K_M, Q8_0"],
        );
    }

    #[test]
    fn an_assistant_comes_with_its_model() {
        let files = [
            "gemma-4-E2B-it-Q4_K_M.gguf",
            "gemma-4-E2B-it-Q8_0.gguf",
            "mmproj-F16.gguf",
            "mtp-gemma-4-E2B-it-Q4_0.gguf",
            "mtp-gemma-4-E2B-it-Q8_0.gguf",
        ];
        check(
            &files,
            None,
            expect!["Q4_K_M: gemma-4-E2B-it-Q4_K_M.gguf mmproj-F16.gguf mtp-gemma-4-E2B-it-Q4_0.gguf"],
        );
        check(
            &files,
            tag("Q8_0"),
            expect!["Q8_0: gemma-4-E2B-it-Q8_0.gguf mmproj-F16.gguf mtp-gemma-4-E2B-it-Q8_0.gguf"],
        );
        // In a folder of its own.
        let nested = [files[0], "mtp-gemma-4-E2B-it.gguf", "MTP/mtp-gemma-4-E2B-it-Q8_0.gguf"];
        check(&nested, None, expect!["Q4_K_M: gemma-4-E2B-it-Q4_K_M.gguf MTP/mtp-gemma-4-E2B-it-Q8_0.gguf"]);
        check(&nested[..2], None, expect!["Q4_K_M: gemma-4-E2B-it-Q4_K_M.gguf mtp-gemma-4-E2B-it.gguf"]);
        // In a repository of its own.
        check(&files[3..], tag("Q8_0"), expect!["Q8_0: mtp-gemma-4-E2B-it-Q8_0.gguf"]);
    }

    #[test]
    fn a_projector_comes_with_its_model() {
        let files = [
            "big/a-Q4_K_M.gguf",
            "big/mmproj-a-F16.gguf",
            "big/mmproj-a-F32.gguf",
            "mmproj-Q8_0.gguf",
            "b-Q8_0.gguf",
            "bigger/mmproj-Q4_0.gguf",
        ];
        check(&files, tag("Q4_K_M"), expect!["Q4_K_M: big/a-Q4_K_M.gguf big/mmproj-a-F16.gguf"]);
        check(&files, tag("Q8_0"), expect!["Q8_0: b-Q8_0.gguf mmproj-Q8_0.gguf"]);
        let files = ["a-Q4_K_M.gguf", "mmproj-f16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj.txt"];
        check(&files, None, expect!["Q4_K_M: a-Q4_K_M.gguf mmproj-BF16.gguf"]);
        check(
            &["mmproj-F16.gguf"],
            None,
            expect![
                "o/r: it has neither a GGUF file, nor config.json with model.safetensors or pytorch_model.bin, nor adapter_config.json with adapter_model.safetensors"
            ],
        );
    }

    #[test]
    fn split_models_come_whole_or_not_at_all() {
        let files = [
            "Q4_K_M/m-00002-of-00002.gguf",
            "Q4_K_M/m-00001-of-00002.gguf",
            "Q8_0/m-Q8_0-00001-of-00003.gguf",
            "Q8_0/m-Q8_0-00002-of-00003.gguf",
        ];
        check(&files, None, expect!["Q4_K_M: Q4_K_M/m-00001-of-00002.gguf Q4_K_M/m-00002-of-00002.gguf"]);
        check(&files, tag("Q8_0"), expect!["o/r: nothing in it is `Q8_0`; there is Q4_K_M"]);
        check(
            &files,
            Some(Choice::File("Q4_K_M/m-00002-of-00002.gguf".into())),
            expect!["Q4_K_M: Q4_K_M/m-00001-of-00002.gguf Q4_K_M/m-00002-of-00002.gguf"],
        );
    }

    #[test]
    fn adapters_come_with_their_tokenizer() {
        let files = [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "checkpoint-10/adapter_config.json",
            "checkpoint-10/adapter_model.safetensors",
            "tokenizer_config.json",
            "training_args.bin",
        ];
        for choice in [None, tag("safetensors"), Some(Choice::File("adapter_model.safetensors".into()))] {
            check(
                &files,
                choice,
                expect!["latest: adapter_config.json adapter_model.safetensors tokenizer_config.json"],
            );
        }
        check(
            &["adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"],
            None,
            expect!["latest: config.json model.safetensors"],
        );
    }

    #[test]
    fn safetensors_come_with_what_belongs_to_them() {
        let files = [
            "README.md",
            "config.json",
            "model.safetensors",
            "consolidated.safetensors",
            "original/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "onnx/model.onnx",
        ];
        check(&files, None, expect!["latest: config.json model.safetensors tokenizer.json"]);
        check(&files, tag("safetensors"), expect!["latest: config.json model.safetensors tokenizer.json"]);
        check(&files, tag("Q4_0"), expect!["o/r: nothing in it is `Q4_0`; there is safetensors"]);
        check(
            &[
                "config.json",
                "pytorch_model.bin",
                "sparse_linear.pt",
                "onnx/model.onnx",
                "2_Dense/pytorch_model.bin",
                "3_Dense/pytorch_model.bin",
                "3_Dense/model.safetensors",
            ],
            None,
            expect![
                "latest: 2_Dense/pytorch_model.bin 3_Dense/model.safetensors config.json pytorch_model.bin sparse_linear.pt"
            ],
        );
        let sharded = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "m-Q4_0.gguf",
        ];
        check(&sharded, None, expect!["Q4_0: m-Q4_0.gguf"]);
        check(
            &sharded,
            tag("safetensors"),
            expect![
                "latest: config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json"
            ],
        );
    }
}
