//! Ends of answers: stop tokens, stop strings, grammars, minimum lengths; and their log-probabilities.

use super::{clients::*, fake::VOCAB};
use crate::{Event, FinishReason, Grammar, Request};

#[test]
fn min_tokens_hold_back_stop_tokens_and_stop_strings() {
    let plain = Request { max_tokens: Some(40), ..request(9) };
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let whole = read(handle.generate(plain.clone()).unwrap());
    let stop_tokens = vec![whole.branches[0].tokens[10]];
    let tokens = |request: &Request| read(handle.generate(request.clone()).unwrap()).branches[0].tokens.len();
    let early = Request { stop_tokens: stop_tokens.clone(), ..plain.clone() };
    assert!(tokens(&early) <= 10);
    let late = Request { min_tokens: 25, ..early };
    assert!(tokens(&late) >= 25);
    assert_answers(&read(handle.generate(late.clone()).unwrap()), &[None], &late);

    let text = &whole.branches[0].text;
    let stop: String = text.chars().skip(4).take(3).collect();
    let early = Request { stop_strings: vec![stop.clone()], ..plain.clone() };
    assert!(tokens(&early) < 15);
    let never = Request { min_tokens: 40, ..early };
    let never = read(handle.generate(never).unwrap());
    assert_eq!((&never.branches[0].text, never.reason()), (text, &FinishReason::Length));

    let all = Request { min_tokens: 1, stop_tokens: (0..VOCAB as u32).collect(), ..plain };
    assert_eq!(
        handle.generate(all).unwrap_err().to_string(),
        "`min_tokens` cannot be kept: every token of the vocabulary is a stop token"
    );
}

#[test]
fn stop_strings_end_an_answer_wherever_tokens_end() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let mut found = 0;
    for i in 0..40 {
        let request = Request { max_tokens: Some(60), ..request(i) };
        let whole = read(handle.generate(request.clone()).unwrap()).branches[0].text.clone();
        let chars: Vec<char> = whole.chars().collect();
        for from in (3..chars.len().saturating_sub(6)).step_by(7) {
            for len in 1..6 {
                let stop: String = chars[from..from + len].iter().collect();
                let at = whole.find(&stop).unwrap();
                for include in [false, true] {
                    let request = Request {
                        stop_strings: vec!["never there".into(), stop.clone()],
                        include_stop_string: include,
                        ..request.clone()
                    };
                    let heard = read(handle.generate(request).unwrap());
                    let end = if include { at + stop.len() } else { at };
                    assert_eq!(heard.branches[0].text, whole[..end], "{stop:?} in {whole:?}");
                    assert_eq!(heard.reason(), &FinishReason::StopString(stop.clone()));
                    assert_eq!(
                        heard.branches[0].end.as_ref().unwrap().1.generated_tokens,
                        heard.branches[0].tokens.len()
                    );
                    found += 1;
                }
            }
        }
    }
    assert!(found > 1000, "{found}");
    assert_clean(&engine);
}

#[test]
fn a_grammar_is_followed_to_its_end_or_to_a_dead_end() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let asked = |regex: &str, branches| {
        let constraint = Some(handle.compile(&Grammar::Regex(regex.into())).unwrap());
        read(handle.generate(Request { constraint, branches, max_tokens: None, ..request(8) }).unwrap())
    };
    let heard = asked("( pa| gu|ro){5}!", 4);
    for branch in &heard.branches {
        let rest = branch.text.strip_suffix('!').unwrap();
        let syllables = rest.replace(" pa", ".").replace(" gu", ".").replace("ro", ".");
        assert_eq!(syllables, ".....", "{:?}", branch.text);
        assert_eq!(branch.end.as_ref().unwrap().0, FinishReason::Complete);
    }
    assert_ne!(heard.branches[0].text, heard.branches[1].text);
    assert!(handle.stats().masks >= 4 * 5, "{:?}", handle.stats());

    let heard = asked("(pa|ro){4}x", 2);
    let error = heard.failed.expect("no token has an x").to_string();
    assert_eq!(
        error,
        "the grammar allows no continuation of the answer: the vocabulary has no token for what must come next, or nothing is allowed there"
    );
    assert!(heard.branches.iter().all(|branch| branch.end.is_none() && branch.text.len() == 8));
    assert_clean(&engine);
}

#[test]
fn one_branch_ends_with_a_stop_string_and_the_others_go_on() {
    let (engine, _) = start(&[None], options());
    let request = Request { branches: 4, max_tokens: Some(50), ..request(11) };
    let whole = read(engine.handle().generate(request.clone()).unwrap());
    let text = &whole.branches[2].text;
    let stop: String = text.chars().skip(text.chars().count() / 2).take(4).collect();
    let stopped = Request { stop_strings: vec![stop.clone()], ..request };
    let heard = read(engine.handle().generate(stopped).unwrap());
    for (answer, whole) in heard.branches.iter().zip(&whole.branches) {
        match whole.text.find(&stop) {
            Some(at) => assert_eq!(answer.text, whole.text[..at]),
            None => assert_eq!(answer.text, whole.text),
        }
    }
    assert_eq!(heard.branches[2].end.as_ref().unwrap().0, FinishReason::StopString(stop));
    assert_clean(&engine);
}

#[test]
fn stop_tokens_of_the_model_and_of_the_request() {
    let plain = Request { max_tokens: Some(40), ..request(9) };
    let (engine, _) = start(&[None], options());
    let tokens = read(engine.handle().generate(plain.clone()).unwrap()).branches[0].tokens.clone();
    let (own, model) = (tokens[20], tokens[10]);
    let first = |token| tokens.iter().position(|&t| t == token).unwrap();
    let (engine, _) = start_with(&[None], options(), vec![model]).unwrap();
    let ends = |request: Request| {
        let heard = read(engine.handle().generate(request).unwrap());
        let (reason, usage) = heard.branches[0].end.clone().unwrap();
        (reason, heard.branches[0].tokens.len(), usage.generated_tokens)
    };
    let at = first(model);
    assert_eq!(ends(plain.clone()), (FinishReason::Stop(model), at, at + 1));
    let ignoring = Request { ignore_stop_tokens: true, ..plain.clone() };
    assert_eq!(ends(ignoring.clone()), (FinishReason::Length, 40, 40));
    let at = first(own);
    assert_eq!(ends(Request { stop_tokens: vec![own], ..ignoring }), (FinishReason::Stop(own), at, at + 1));
}

#[test]
fn log_probabilities_come_where_they_are_asked_for() {
    let (engine, _) = start(&[None], options());
    for logprobs in [None, Some(0), Some(3)] {
        let mut generation = engine.handle().generate(Request { logprobs, ..request(2) }).unwrap();
        let mut tokens = 0;
        while let Some(event) = generation.next_blocking() {
            if let Event::Token { logprob, top, .. } = event {
                tokens += 1;
                assert_eq!((logprob.is_some(), top.len()), (logprobs.is_some(), logprobs.unwrap_or(0)));
            }
        }
        assert_eq!(tokens, request(2).max_tokens.unwrap());
    }
}
